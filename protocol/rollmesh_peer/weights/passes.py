"""Which peers may take chunks from us: those that showed a pass which the learner signed, or those the learner knows.

A peer shows its pass when it opens a have stream; it is remembered, so that chunk requests need not carry it. On the
learner its own list of admitted peers decides instead. Nothing is sent or stored here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.messages import Pass


class PassBook:
    """The admissions that one peer of a run has seen.

    Args:
        run: the run's id.
        learner: its peer id, and the only signer of passes. It is always admitted.
        newest_version: the newest policy version heard of; passes older than ``limits.PASS_VERSIONS`` are refused.
        admits: the learner's own judgement of a peer; when given, it alone decides and passes are not looked at.
    """

    def __init__(
        self,
        *,
        run: str,
        learner: str,
        newest_version: Callable[[], int],
        admits: Callable[[str], bool] | None = None,
    ) -> None:
        self._run = run
        self.learner: Final = learner
        self._newest_version = newest_version
        self._admits = admits
        self._issued: OrderedDict[str, int] = OrderedDict()
        self._revoked: OrderedDict[str, None] = OrderedDict()

    def present(self, peer: str, sealed: bytes) -> None:
        """Remember the pass that ``peer`` (as the handshake proved it) shows.

        Raises:
            Refused: ``node.not_admitted``, ``node.quarantined`` or an ``envelope.*`` code.
        """
        if self._admits is None and peer != self.learner and peer not in self._revoked:
            envelope = Envelope.decode(sealed, limit=limits.SMALL_BYTES)
            shown = Pass.decode(
                envelope.open(run=self._run, kind="pass", signer=self.learner), limit=limits.SMALL_BYTES
            )
            if shown.peer != peer:
                raise Refused("node.not_admitted", "the pass was given to another peer")
            self._issued[peer] = max(shown.issued_version, self._issued.get(peer, 0))
            self._issued.move_to_end(peer)
            if len(self._issued) > limits.MAX_CONDUCT_PEERS:
                self._issued.popitem(last=False)
        self.require(peer)

    def require(self, peer: str) -> None:
        """Refuse a peer that is not admitted.

        Raises:
            Refused: ``node.not_admitted`` or ``node.quarantined``.
        """
        if peer in self._revoked:
            raise Refused("node.quarantined")
        if peer == self.learner:
            return
        if self._admits is not None:
            if not self._admits(peer):
                raise Refused("node.not_admitted")
            return
        issued = self._issued.get(peer)
        if issued is None:
            raise Refused("node.not_admitted", "this peer has shown no pass")
        if self._newest_version() - issued > limits.PASS_VERSIONS:
            raise Refused("node.not_admitted", "this peer's pass is too old; say hello to the learner again")

    def revoke(self, peer: str) -> None:
        """Serve ``peer`` no more, whatever it shows: it is quarantined."""
        self._issued.pop(peer, None)
        self._revoked[peer] = None
        if len(self._revoked) > limits.MAX_CONDUCT_PEERS:
            self._revoked.popitem(last=False)

    def restore(self, peer: str) -> None:
        """Take a revocation back."""
        self._revoked.pop(peer, None)
