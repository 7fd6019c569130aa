"""Gossip: the learner announces versions and notices, everybody passes them on, nobody else is heard.

Invariant: a message is delivered and passed on only when the learner wrote it (by the gossip layer's authorship and by
its envelope), and never when it is older than what was seen: an old notice stays dead over a restart. Gossip is a
hint that may be lost; the head is also in every answer of the learner. Fetching what is announced is not done here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import trio

from rollmesh_peer.mesh.seam import Mesh
from rollmesh_peer.weights.durable import disk_errors, write_file
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope, Kind, seal
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Notice, PolicyHeader
from rollmesh_protocol.streams import notice_topic, policy_topic

log = logging.getLogger("rollmesh.gossip")

NoticeKind = Literal["pause", "resume", "drain", "ended"]
_COUNTER_BYTES: Final = 32
"""A sequence number in decimal, with room."""


class SequenceFile:
    """The highest notice sequence ever used or heard of, durable before anyone acts on it.

    Args:
        path: a file of a few bytes; made on first use. A file that cannot be read counts as a fault of this machine,
            not as zero: sequence numbers must not start again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            text = path.read_text(encoding="ascii")[:_COUNTER_BYTES]
            self.highest: int = int(text)
        except FileNotFoundError:
            self.highest = 0
        except (OSError, ValueError) as error:
            raise HostError(f"{path} does not hold a sequence number: {error}") from error

    def advance(self, sequence: int) -> bool:
        """Write a higher ``sequence`` down; False, and nothing done, for any other. Blocks on the disk.

        HostError when the disk fails: then it holds until this process ends.
        """
        if sequence <= self.highest:
            return False
        self.highest = sequence
        with disk_errors(f"{self._path.name} cannot be written"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path, str(sequence).encode())
        return True


class Announcer:
    """The learner's voice."""

    def __init__(self, mesh: Mesh, *, run: str, identity: Identity, sequence: SequenceFile) -> None:
        self._mesh = mesh
        self._run = run
        self._identity = identity
        self._sequence = sequence

    async def announce(self, header: PolicyHeader) -> None:
        """Tell everybody that a version is out. Its chunks and manifest must be servable before."""
        await self._publish(policy_topic(self._run), "policy", header.encode())

    async def notify(self, kind: NoticeKind, *, text: str) -> Notice:
        """Send a notice under the next sequence number."""
        notice = Notice(sequence=self._sequence.highest + 1, kind=kind, text=text[: limits.MAX_TEXT_CHARS])
        await trio.to_thread.run_sync(self._sequence.advance, notice.sequence)
        await self._publish(notice_topic(self._run), "notice", notice.encode())
        return notice

    async def _publish(self, topic: str, kind: Kind, body: bytes) -> None:
        await self._mesh.publish(topic, seal(body, run=self._run, kind=kind, identity=self._identity).encode())


class Bulletin:
    """Everybody else's ear. Make one per run, then let :meth:`run` run.

    Args:
        on_header: called with each verified header that is not older than the newest one.
        on_notice: called with each verified notice whose sequence is new, after it was written down.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        run: str,
        learner: str,
        sequence: SequenceFile,
        on_header: Callable[[PolicyHeader], None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._run = run
        self._learner = learner
        self._sequence = sequence
        self._newest_version = 0
        self._on_header = on_header
        self._on_notice = on_notice
        self._policy = mesh.subscribe(policy_topic(run), accept=self.accepts_policy)
        self._notice = mesh.subscribe(notice_topic(run), accept=self.accepts_notice)

    def accepts_policy(self, author: str, message: bytes) -> bool:
        """The validator of the policy topic: the learner's word, and not older than what we know."""
        return self._is_from_learner(author, message) and self._header(message) is not None

    def accepts_notice(self, author: str, message: bytes) -> bool:
        """The validator of the notice topic: the learner's word, and a sequence number that we have not seen."""
        return self._is_from_learner(author, message) and self._opened_notice(message) is not None

    async def run(self) -> None:
        """Hand on what arrives, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hear_headers)
            nursery.start_soon(self._hear_notices)

    async def _hear_headers(self) -> None:
        async for message in self._policy:
            header = self._header(message)
            if header is not None:
                self._newest_version = header.version
                log.debug("heard of version %d", header.version)
                self._on_header(header)

    async def _hear_notices(self) -> None:
        async for message in self._notice:
            notice = self._opened_notice(message)
            if notice is None:
                continue
            try:
                await trio.to_thread.run_sync(self._sequence.advance, notice.sequence)
            except HostError as error:
                log.warning("a notice is obeyed, but not written down: %s", error)
            log.info(
                "notice %d from the learner (%s): %s", notice.sequence, notice.kind, notice.text or "no reason given"
            )
            self._on_notice(notice)

    def _is_from_learner(self, author: str, message: bytes) -> bool:
        """Authorship of the gossip message itself: a stranger could publish a genuine envelope again and again."""
        return author == self._learner and len(message) <= limits.GOSSIP_BYTES

    def _header(self, message: bytes) -> PolicyHeader | None:
        try:
            header = PolicyHeader.decode(self._opened(message, "policy"), limit=limits.GOSSIP_BYTES)
        except Refused as error:
            log.debug("dropped a policy header: %s", error)
            return None
        return header if header.version >= self._newest_version else None

    def _opened_notice(self, message: bytes) -> Notice | None:
        try:
            notice = Notice.decode(self._opened(message, "notice"), limit=limits.GOSSIP_BYTES)
        except Refused as error:
            log.debug("dropped a notice: %s", error)
            return None
        return notice if notice.sequence > self._sequence.highest else None

    def _opened(self, message: bytes, kind: Kind) -> bytes:
        envelope = Envelope.decode(message, limit=limits.GOSSIP_BYTES)
        return envelope.open(run=self._run, kind=kind, signer=self._learner)
