"""Gives leases back to the learner, over lost links too, so that their samples go to others at once."""

from __future__ import annotations

import logging
from typing import Final

import trio

from rollmesh_node.joining import Membership
from rollmesh_node.uplink import Uplink
from rollmesh_peer.logging_setup import event
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.messages import ReturnRequest

RETURN_S: Final = 60.0
"""How long leases are tried to be given back; after that they run out by themselves."""
RETRY_S: Final = 1.0
"""After a request that got lost; the link's own back-off comes on top."""
MAX_IDS: Final = 4 * limits.MAX_GROUPS_PER_REQUEST
"""Leases in one return."""

_log = logging.getLogger(__name__)


class Returner:
    """Any number of returns may be under way; :meth:`wait_done` waits for all of them."""

    def __init__(self, uplink: Uplink, membership: Membership) -> None:
        self._uplink = uplink
        self._membership = membership
        self._under_way = 0
        self._done = trio.Event()

    def begin(self, nursery: trio.Nursery, lease_ids: tuple[bytes, ...], *, code: str) -> None:
        """Return leases in a task of ``nursery``."""
        self._under_way += 1
        nursery.start_soon(self._give_back, lease_ids, code)

    async def wait_done(self) -> None:
        """Return when nothing is under way."""
        while self._under_way:
            await self._done.wait()

    async def _give_back(self, lease_ids: tuple[bytes, ...], code: str) -> None:
        try:
            with trio.move_on_after(RETURN_S) as scope:
                for start in range(0, len(lease_ids), MAX_IDS):
                    await self._send(ReturnRequest(lease_ids=lease_ids[start : start + MAX_IDS], code=code))
            if scope.cancelled_caught:
                event(_log, "leases could not be given back and run out by themselves", leases=len(lease_ids))
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._done.set()
                self._done = trio.Event()

    async def _send(self, request: ReturnRequest) -> None:
        while True:
            await self._membership.wait_admitted()
            try:
                answer = await self._uplink.give_back(request)
            except LinkLost:
                await trio.sleep(RETRY_S)
            except Refused as refusal:
                if refusal.code != "node.not_admitted":
                    _log.debug("the learner did not take leases back: %s", refusal)
                    return
                self._membership.renew()
                await trio.sleep(RETRY_S)
            else:
                event(_log, "leases given back", leases=answer.returned, code=request.code)
                return
