"""An environment that runs the answer it is given, as the worst scorer would, and the answers that attack it.

The stage of ``tests/support/sandbox_stage.py`` copies this folder to where its user may read it. An honest answer's
reward goes through numpy, ``json`` and the built-in functions, so that whatever an attack patches would show in it.
"""

from __future__ import annotations

import json

import numpy as np

from rollmesh_protocol.environments.interface import Item

from . import breaking, calls, hanging, reaching  # noqa: F401 - they fill the list
from .registry import ATTACKS

HONEST_REWARD = 0.75


class Hostile:
    """Scores "honest" and "wrong" as told, and runs the attack that any other answer names."""

    name = "hostile"

    def item(self, index):
        return Item("attack", {})

    def messages(self, item):
        return ()

    def reward(self, item, completion):
        if completion in ("honest", "wrong"):
            parts = json.loads("[0.5, 1.0]") if completion == "honest" else [0.0]
            return float(np.mean(np.asarray(parts)))
        return ATTACKS[completion].run(dict(item.key))


def make(parameters, /, *, seed):
    return Hostile()
