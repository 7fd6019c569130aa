"""A subscriber's end of one gossip topic: judges messages, keeps the newest, never blocks whoever brings them."""

from __future__ import annotations

import logging

import trio

from rollmesh_peer.mesh.seam import Accept
from rollmesh_protocol import limits
from rollmesh_protocol.identity import short

log = logging.getLogger("rollmesh.mesh.gossip")


class Subscription:
    """One topic that somebody in this process listens to."""

    def __init__(self, topic: str, *, accept: Accept) -> None:
        self.topic = topic
        self._accept = accept
        self._send, self.receive = trio.open_memory_channel[bytes](limits.GOSSIP_BUFFER)
        self._oldest = self.receive.clone()

    def offer(self, author: str, message: bytes) -> bool:
        """Deliver a message if the subscriber's judge takes it. False, and nothing delivered, if not.

        A subscriber that closed its channel goes on judging, so that others are served.
        """
        try:
            if not self._accept(author, message):
                return False
        except Exception:
            log.exception("judging a message of %s on %s failed", short(author), self.topic)
            return False
        while not self._is_abandoned:
            try:
                self._send.send_nowait(message)
            except trio.WouldBlock:
                self._oldest.receive_nowait()
                log.info("dropping an old message on %s: nobody reads", self.topic)
            else:
                break
        return True

    @property
    def takes_nothing(self) -> bool:
        """True for a topic that we only publish on: whatever others say there is not worth a look."""
        return self._accept is nothing

    @property
    def _is_abandoned(self) -> bool:
        return self.receive.statistics().open_receive_channels <= 1


def nothing(_author: str, _message: bytes) -> bool:
    """The judge of a topic that we publish on and do not listen to."""
    return False
