"""A node's way to the head: hears of versions, plans the cheapest way, has it fetched, and lets the keeper advance.

It never chases: what is already fetched counts as free in every plan, so a fetch under way is given up only for a whole
path that is cheaper still, and whatever is complete is applied before more is fetched. Invariant: weights advance only
through the keeper, over manifests that the learner signed and that say what was planned for. It tries for ever, with
back-off, and always says what it waits for. How chunks travel is the swarm's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import trio

from rollmesh_peer.mesh.keeping import Backoff
from rollmesh_peer.mesh.requests import ask
from rollmesh_peer.mesh.seam import Mesh
from rollmesh_peer.weights.board import Pulse
from rollmesh_peer.weights.edge_book import EdgeBook
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.lineage import Link
from rollmesh_peer.weights.preparing import Prepares, prepare_while_fetched
from rollmesh_peer.weights.swarm import Swarm
from rollmesh_protocol import limits
from rollmesh_protocol.errors import LinkLost, Refused, RollmeshError
from rollmesh_protocol.manifest import Edge, Manifest
from rollmesh_protocol.messages import EdgesAnswer, EdgesRequest, Head, PolicyHeader
from rollmesh_protocol.streams import EDGES

log = logging.getLogger("rollmesh.weights")

_STALLED_S = 30.0
"""A fetch that gained nothing for this long asks the learner whether the edge is still on offer."""
_SHORT_WAY = 2
"""Edges of a way that is taken without asking the learner for a shorter one."""

Path = Sequence[Link]
OnVersion = Callable[[int, bytes], None]


class Weights(Prepares, Protocol):
    """What the follower needs of the keeper."""

    @property
    def root(self) -> bytes | None: ...
    @property
    def version(self) -> int: ...
    @property
    def is_quarantined(self) -> bool: ...

    highest: int

    def is_refused(self, name: bytes) -> bool: ...
    async def advance(self, path: Path) -> None: ...
    async def confirm(self, *, root: bytes, version: int, step: int) -> bool: ...


class Follower:
    """Keeps the weights at the head. Feed it with heads and headers, and let :meth:`run` run.

    Args:
        max_download_bytes: the largest payload that is fetched; the owner's limit.
        chance: a number in [0, 1) for each back-off, so that many nodes do not come back at once.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        learner: str,
        store: EdgeStore,
        keeper: Weights,
        swarm: Swarm,
        max_download_bytes: int,
        chance: Callable[[], float],
    ) -> None:
        self._mesh = mesh
        self._learner = learner
        self._store = store
        self._keeper = keeper
        self._swarm = swarm
        self._max_download_bytes = max_download_bytes
        self._chance = chance
        self._head: Head | None = None
        self._book = EdgeBook()
        self._asked: tuple[bytes | None, int] | None = None
        """The root and the head for which the learner was last asked for edges."""
        self._confirmed = 0
        """The newest version that names the root held."""
        self._news = Pulse()
        self._listeners: list[OnVersion] = []
        self._trouble = ""
        self._doing = "the first word of a version"

    # --- what it is told ---------------------------------------------------------------------------------------------
    def hear_head(self, head: Head) -> None:
        """The learner's word of its newest version, as it comes with each of its answers. Older ones are ignored."""
        if head.version >= 1 and (self._head is None or head.version > self._head.version):
            self._head = head
            self._news.fire()

    def hear_header(self, header: PolicyHeader) -> None:
        """A verified gossip header: a head, and the edge that leads there."""
        self._book.learn(
            Edge(
                kind="anchor" if header.parent is None else "patch",
                version=header.version,
                step=header.step,
                parent=header.parent,
                root=header.root,
                manifest=header.manifest,
                manifest_bytes=header.manifest_bytes,
                payload_bytes=header.payload_bytes,
            )
        )
        self.hear_head(Head(version=header.version, step=header.step, root=header.root))

    def listen(self, on_version: OnVersion) -> None:
        """Call ``on_version(version, root)`` whenever verified weights are held."""
        self._listeners.append(on_version)

    @property
    def head(self) -> Head | None:
        """The newest version heard of."""
        return self._head

    @property
    def waiting_for(self) -> str:
        """One sentence; empty while the weights are at the head."""
        if self._head is not None and self._is_there(self._head):
            return ""
        parts = [self._swarm.progress.waiting_for or self._doing, self._trouble]
        return "; ".join(part for part in parts if part)[: limits.MAX_TEXT_CHARS]

    # --- the loop ----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Follow for ever."""
        backoff = Backoff()
        while True:
            head = self._head
            if head is None or self._is_there(head):
                self._trouble = ""
                await self._news.wait()
                continue
            try:
                await self._move_towards(head)
            except RollmeshError as error:
                backoff = backoff.failed()
                delay_s = backoff.delay_s(chance=self._chance())
                self._trouble = f"last try: {error}"
                log.warning("not at version %d yet: %s (next try in %.1f s)", head.version, error, delay_s)
                with trio.move_on_after(delay_s):
                    await self._news.wait()
            else:
                self._trouble = ""
                backoff = Backoff()

    def _is_there(self, head: Head) -> bool:
        return self._keeper.root == head.root and max(self._keeper.version, self._confirmed) >= head.version

    async def _move_towards(self, head: Head) -> None:
        """One step on the way: a name for what is held, an edge fetched, or edges applied."""
        if await self._keeper.confirm(root=head.root, version=head.version, step=head.step):
            self._confirmed = head.version
            self._tell()
            return
        if not self._may_take(head.version):
            raise Refused(
                "manifest.version",
                f"the learner offers version {head.version}, and version {self._keeper.highest} was verified here",
            )
        path = await self._way(head)
        with ExitStack() as pins:
            for edge in path:
                pins.enter_context(self._store.pin(edge.manifest))
            ready = _prefix(path, await self._missing(path))
            if ready and self._may_take(ready[-1].version):
                await self._apply(ready)
            else:
                await self._fetch(path[len(ready)], head)

    def _may_take(self, version: int) -> bool:
        """True when the keeper may stop at ``version``: it is newer than all before, or mends broken weights."""
        highest = self._keeper.highest
        return version > highest or (version == highest and self._keeper.is_quarantined)

    # --- planning ----------------------------------------------------------------------------------------------------
    async def _way(self, head: Head) -> tuple[Edge, ...]:
        """The cheapest way to ``head``, or to a newer one that the learner tells of.

        Raises:
            LinkLost: no way is known, and the learner does not answer.
            Refused: ``manifest.parent`` when there is no way; ``manifest.limits`` when every way is too large.
        """
        path = await self._plan(head)
        question = (self._keeper.root, head.version)
        if path is not None and (len(path) <= _SHORT_WAY or self._asked == question):
            return path
        self._doing = "the learner's word on the way to the newest weights"
        try:
            offered = await self._ask_for_edges()
        except (LinkLost, Refused):
            if path is not None:
                return path
            raise
        self._asked = question
        path = await self._plan(self._head or head)
        if path is None:
            raise self._no_way(head, offered)
        return path

    async def _plan(self, head: Head) -> tuple[Edge, ...] | None:
        """The way to ``head`` that costs the fewest bytes still to be fetched, over the edges that we know of.

        After a rollback the same root may lie at the end of an old edge too: the last edge must be a new one.
        """
        usable = [
            edge
            for edge in self._book.edges
            if self._is_usable(edge) and (edge.root != head.root or self._may_take(edge.version))
        ]
        missing = dict(zip(usable, await self._missing(usable), strict=True))
        path = self._book.plan(missing, held=self._keeper.root, goal=head.root)
        return path if path and self._may_take(path[-1].version) else None

    async def _ask_for_edges(self) -> Sequence[Edge]:
        """The edges that the learner has on offer; they replace those that we knew."""
        request = EdgesRequest(root=self._keeper.root).encode()
        raw = await ask(
            self._mesh, self._learner, EDGES, request, answer_bytes=limits.EDGES_BYTES, deadline_s=limits.REQUEST_S
        )
        answer = EdgesAnswer.decode(raw, limit=limits.EDGES_BYTES)
        self._book.replace(answer.edges, head_version=answer.head.version)
        self.hear_head(answer.head)
        return answer.edges

    def _no_way(self, head: Head, offered: Sequence[Edge]) -> Refused:
        allowed = self._max_download_bytes
        too_large = [edge.payload_bytes for edge in offered if edge.payload_bytes > allowed]
        if too_large:
            return Refused(
                "manifest.limits",
                f"the way to version {head.version} needs a download of {min(too_large) / limits.GIB:.2f} GiB, "
                f"and this node allows {allowed / limits.GIB:.2f} GiB",
            )
        reasons = [reason for edge in offered if (reason := self._book.why_useless(edge))]
        why = f" ({reasons[-1]})" if reasons else ""
        return Refused("manifest.parent", f"no edge leads from the weights held to version {head.version}{why}")

    def _is_usable(self, edge: Edge) -> bool:
        return not self._keeper.is_refused(edge.manifest) and edge.payload_bytes <= self._max_download_bytes

    async def _missing(self, edges: Sequence[Edge]) -> list[int]:
        """Bytes still to be fetched for each edge."""
        return await trio.to_thread.run_sync(lambda: [self._missing_bytes(edge) for edge in edges])

    def _missing_bytes(self, edge: Edge) -> int:
        manifest = self._store.manifest(edge.manifest)
        if manifest is None:
            return edge.payload_bytes
        if self._store.is_complete(edge.manifest):
            return 0
        held = sum(manifest.chunk_length(index) for index in self._store.held(edge.manifest))
        return max(1, manifest.payload_bytes - held)

    # --- fetching and applying ---------------------------------------------------------------------------------------
    async def _fetch(self, edge: Edge, head: Head) -> None:
        """Complete one edge's payload, unless a cheaper way turns up meanwhile."""
        self._doing = f"version {edge.version}"
        try:
            manifest = await self._swarm.manifest(edge.manifest, max_bytes=edge.manifest_bytes)
            _check_promise(edge, manifest)
        except LinkLost:
            self._book.forget(edge)
            raise
        except Refused as error:
            if error.code != "manifest.limits":
                self._discard(edge, error)
            raise
        failure: RollmeshError | None = None

        async def fetch() -> None:
            nonlocal failure
            try:
                await self._swarm.fetch(edge.manifest)
            except RollmeshError as error:
                failure = error
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            nursery.start_soon(self._prepare, (edge.manifest, manifest))
            await self._wait_cheaper(edge, head)
            log.info("version %d is left for a cheaper way", edge.version)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _prepare(self, link: Link) -> None:
        await prepare_while_fetched(link, keeper=self._keeper, store=self._store, gained=self._swarm.gained)

    async def _wait_cheaper(self, edge: Edge, head: Head) -> None:
        """Return when the cheapest way to the head does not pass over ``edge`` any more."""
        while True:
            gained = self._bytes_gained()
            with trio.move_on_after(_STALLED_S) as stalled:
                await self._news.wait()
            if stalled.cancelled_caught:
                if gained != self._bytes_gained() or not await self._is_withdrawn(edge):
                    continue
                log.info("version %d is not on offer any more", edge.version)
            path = await self._plan(self._head or head)
            if path is not None and edge not in path:
                return

    def _bytes_gained(self) -> int:
        progress = self._swarm.progress
        return progress.bytes_from_learner + progress.bytes_from_peers

    async def _is_withdrawn(self, edge: Edge) -> bool:
        try:
            return edge.manifest not in [offered.manifest for offered in await self._ask_for_edges()]
        except (LinkLost, Refused):
            return False

    async def _apply(self, path: Sequence[Edge]) -> None:
        self._doing = f"version {path[-1].version} to be applied"
        links = await trio.to_thread.run_sync(self._links, path)
        try:
            await self._keeper.advance(links)
        except Refused as error:
            for edge in path:
                if self._keeper.is_refused(edge.manifest):
                    self._discard(edge, error)
            if error.code in ("manifest.parent", "manifest.version"):
                self._book.replace((), head_version=path[-1].version)
            raise
        self._tell()
        await trio.to_thread.run_sync(self._prune)

    def _links(self, path: Sequence[Edge]) -> list[Link]:
        links = []
        for edge in path:
            manifest = self._store.manifest(edge.manifest)
            if manifest is None:
                raise LinkLost("a manifest went away; it is fetched again")
            _check_promise(edge, manifest)
            links.append((edge.manifest, manifest))
        return links

    def _prune(self) -> None:
        """Keep the newest payloads, for slower peers; what the keeper needs is pinned by it."""
        versions = {name: manifest.version for name in self._store.names() if (manifest := self._store.manifest(name))}
        newest = sorted(versions, key=lambda name: versions[name], reverse=True)
        self._store.retain(newest[: limits.RETAINED_EDGES])

    def _discard(self, edge: Edge, error: Refused) -> None:
        log.warning("the edge to version %d is of no use: %s", edge.version, error)
        self._book.discard(edge, why=str(error))

    def _tell(self) -> None:
        root = self._keeper.root
        if root is not None:
            for on_version in self._listeners:
                on_version(self._keeper.version, root)


def _prefix(path: Sequence[Edge], missing: Sequence[int]) -> list[Edge]:
    """The edges at the beginning of ``path`` of which nothing is missing."""
    ready = []
    for edge, still in zip(path, missing, strict=True):
        if still:
            break
        ready.append(edge)
    return ready


def _check_promise(edge: Edge, manifest: Manifest) -> None:
    """Refuse a manifest that says something else than the edge it was chosen for."""
    said = (manifest.version, manifest.step, manifest.parent, manifest.root, manifest.payload_bytes)
    if said != (edge.version, edge.step, edge.parent, edge.root, edge.payload_bytes):
        raise Refused("manifest.invalid", "the manifest does not say what its announcement said")
