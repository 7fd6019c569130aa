"""Tells the log what the node waits for, when it has waited for a while and whenever that changes."""

from __future__ import annotations

import logging
import re
from typing import Final

import trio

from rollmesh_node.report import NodeReport
from rollmesh_peer.logging_setup import event

LOOK_S: Final = 1.0
PATIENCE_S: Final = 3.0
"""Waits shorter than this are part of ordinary work and not told."""
REPEAT_S: Final = 300.0
"""The same wait is told again after this long."""

_NUMBER: Final = re.compile(r"\d+")
_log = logging.getLogger(__name__)


async def narrate(report: NodeReport) -> None:
    """Report every lasting wait once, until cancelled."""
    told, told_at, since, seen = "", 0.0, trio.current_time(), ""
    while True:
        now = trio.current_time()
        sentence = report.waiting_for
        gist = _NUMBER.sub("#", sentence)  # countdowns are not news
        if gist != seen:
            seen, since = gist, now
        is_news = gist != told or now - told_at >= REPEAT_S
        if sentence and is_news and now - since >= PATIENCE_S:
            event(_log, "waiting", what=sentence)
            told, told_at = gist, now
        await trio.sleep(LOOK_S)
