"""What the learner tells of the run: built at most once a second, from the live parts, for anyone who asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import trio

from rollmesh_learner.audit.auditor import Auditor
from rollmesh_learner.members.nodes import Node, Nodes
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.steps import Stepper
from rollmesh_learner.work.book import Book
from rollmesh_peer.mesh.seam import Mesh, PeerLink
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.messages import RunCard
from rollmesh_protocol.status import (
    PEERS_PER_PAGE,
    PeerStatus,
    RunStatus,
    SpreadStatus,
    StatusAnswer,
    StatusRequest,
    TrustStatus,
)


class RunReporter:
    """Builds :class:`RunStatus` pages; the newest is kept for :data:`limits.STATUS_EVERY_S`."""

    def __init__(
        self,
        *,
        card: RunCard,
        software: str,
        steps: int,
        is_public: bool,
        mesh: Mesh,
        book: Book,
        nodes: Nodes,
        versions: Versions,
        stepper: Stepper,
        auditor: Auditor,
        head_bytes: Callable[[], int],
        spread: Callable[[float], tuple[SpreadStatus, ...]],
        trust: Callable[[], TrustStatus],
        withheld: Callable[[str], str],
        troubles: Callable[[], Sequence[str]],
        children: Callable[[], Sequence[str]],
    ) -> None:
        self._card = card
        self._software = software
        self._steps = steps
        self._is_public = is_public
        self._mesh = mesh
        self._book = book
        self._nodes = nodes
        self._versions = versions
        self._stepper = stepper
        self._auditor = auditor
        self._head_bytes = head_bytes
        self._spread = spread
        self._trust = trust
        self._withheld = withheld
        self._troubles = troubles
        self._children = children
        self._started = trio.current_time()
        self._pages: dict[int, StatusAnswer] = {}
        self._encoded: dict[int, bytes] = {}
        self._built_at = -limits.STATUS_EVERY_S

    async def status(self, peer: str, request: bytes) -> bytes:
        """One :class:`StatusRequest` and its :class:`StatusAnswer`; anybody may ask where the operator allows it."""
        if not self._is_public and not self._nodes.is_admitted(peer):
            raise Refused("node.not_admitted", "the operator shows the status of this run to its nodes only")
        answer = self.answer(StatusRequest.decode(request, limit=limits.SMALL_BYTES))
        page = answer.run.page if answer.run is not None else 0
        if page not in self._encoded:
            self._encoded[page] = answer.encode()
        return self._encoded[page]

    def answer(self, request: StatusRequest) -> StatusAnswer:
        """The page asked for; a page beyond the last is the last."""
        now = trio.current_time()
        if now - self._built_at >= limits.STATUS_EVERY_S:
            self._pages.clear()
            self._encoded.clear()
            self._built_at = now
        nodes = self._nodes.all()
        pages = max(1, -(-len(nodes) // PEERS_PER_PAGE))
        page = min(request.page, pages - 1)
        if page not in self._pages:
            self._pages[page] = self._build(nodes, page=page, pages=pages, now=now)
        return self._pages[page]

    def _build(self, nodes: list[Node], *, page: int, pages: int, now: float) -> StatusAnswer:
        links = self._mesh.links()
        shown = nodes[page * PEERS_PER_PAGE : (page + 1) * PEERS_PER_PAGE]
        troubles = [trouble for trouble in self._troubles() if trouble]
        return StatusAnswer(
            run=RunStatus(
                run=self._card.run,
                name=self._card.name,
                learner=self._card.learner,
                software=self._software,
                state="; ".join([*troubles, self._stepper.state])[: limits.MAX_TEXT_CHARS],
                head=self._versions.head,
                head_bytes=self._head_bytes(),
                model_bytes=self._card.layout.image_bytes,
                spread=self._spread(now),
                step=self._book.next_step,
                steps=self._steps,
                mean_reward=self._stepper.mean_reward,
                rollbacks=self._stepper.num_rollbacks,
                last_rollback=self._stepper.last_rollback[: limits.MAX_TEXT_CHARS],
                groups_leased=sum(1 for g in self._book.groups.values() if not g.is_complete),
                groups_ready=sum(1 for g in self._book.groups.values() if g.is_complete),
                rollouts_accepted=self._book.tally.accepted,
                rollouts_rejected=self._book.tally.rejected,
                audits_done=self._auditor.done,
                audits_failed=self._auditor.failed,
                trust=self._trust(),
                bubble_fraction=self._stepper.clock.bubble_fraction,
                uptime_s=now - self._started,
                children=tuple(line[:256] for line in self._children()),
                peers=tuple(self._peer(node, links.get(node.peer), now=now) for node in shown),
                page=page,
                pages=pages,
            ),
            node=None,
        )

    def _peer(self, node: Node, link: PeerLink | None, *, now: float) -> PeerStatus:
        engine = node.hello.engine
        path: Literal["in", "out", "none"] = "none" if link is None else "out" if link.outbound else "in"
        return PeerStatus(
            peer=node.peer,
            name=node.name[:64],
            role=node.hello.role,
            engine=f"{engine.backend} {engine.dtype} on {engine.device}"[:256] if engine else "",
            connected=link is not None,
            path=path,
            version=node.version_held,
            tokens_per_s=node.tokens_per_s,
            standing=self._nodes.standing_of(node.peer),
            leased_samples=self._book.outstanding(node.peer),
            last_accepted_s=None if node.last_accepted_at is None else now - node.last_accepted_at,
            last_seen_s=now - node.last_seen,
            waiting_for=node.waiting_for,
            withheld=self._withheld(node.peer),
        )
