"""Hostile nodes against a real learner: each is refused with the right code, and an honest node beside it works on.

All attacks run against one learner process, which trains on what an honest node process gives it the whole time. After
every test that node must have had more work accepted and none refused, and the learner must not have failed anywhere.
"""

from __future__ import annotations

import ast
import math
import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
import trio
import zstandard
from libp2p.exceptions import BaseLibp2pError

from rollmesh_peer.models.base import write_base_image
from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import ChunkRequest, LeaseRequest, StatusRequest
from rollmesh_protocol.rollout import SampleResult, Segment
from tests.support.attacker import (
    PLAIN_TOKEN,
    Attacker,
    Weight,
    open_attacker,
    open_studio,
    result_of,
    sample_of,
)
from tests.support.mesh_hostile import DATA, attack, begin, frame, is_closed, stock_host
from tests.support.system import System, open_system
