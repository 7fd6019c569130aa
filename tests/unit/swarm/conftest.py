"""The swarm under a virtual clock: what a daemon does in a thread happens at once, so that no clock runs meanwhile."""

from __future__ import annotations

import pytest
import trio


async def inline(function, *arguments, **_options):
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch):
    monkeypatch.setattr(trio.to_thread, "run_sync", inline)
