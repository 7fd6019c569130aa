"""The engine as the daemon sees it: a supervised child that is given verified weights and turns leases into results.

The invariants: weights are loaded only from a view that the keeper holds still; a load or a stream that fails ends the
child, so that the next one starts from a clean process. While the engine has weights one stream is open, and leases
are said to it as notes (:mod:`.engine.pipe`). It imports no torch: the child does.

Not here: what to load and to generate (``decisions``, which hears of everything as events), and what becomes of
rollouts (``results``).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import trio

from rollmesh_node.engine import pipe
from rollmesh_node.engine.backend import GroupRequest, SampleRequest
from rollmesh_node.engine.pipe import Beat, Refusal, group_body
from rollmesh_node.engine.segments import Completion
from rollmesh_node.events import (
    Drew,
    EngineDown,
    EngineRests,
    EngineUp,
    Event,
    LeaseDone,
    LeaseSpoiled,
    Loaded,
    SampleMade,
)
from rollmesh_node.journal import Journal
from rollmesh_node.overseer import Overseer
from rollmesh_node.results import ResultDesk
from rollmesh_node.spool import Spool
from rollmesh_peer.children.launch import ChildSpec
from rollmesh_peer.children.process import Child, Stream
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_peer.logging_setup import event
from rollmesh_peer.weights.keeper import Keeper
from rollmesh_protocol.errors import ChildFailed, HostError, Refused, RollmeshError
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import EngineInfo, RunCard
from rollmesh_protocol.rollout import MAX_FINGERPRINT_CHARS

LOAD_S: Final = 900.0
"""Deadline of one load: 16 GB from a slow disk, and a model library that compiles kernels."""
STATS_S: Final = 30.0
ITEM_S: Final = 3600.0
"""The last resort for an engine that says nothing at all; one that stands still is found out much sooner (overseer)."""
WHY_CHARS: Final = 300
"""Of a backend's last words, in the reason for another."""
HOPELESS: Final = frozenset({"card.model", "patch.dtype"})
"""Codes of a load that no second try can mend."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """How the child is started, and what each load call says beside the weights."""

    spec: ChildSpec
    declared: EngineInfo
    is_model: bool
    """False for the scripted engine, which needs neither memory nor a model."""
    load: Mapping[str, object]
    why: str = ""
    """Why this backend, and these GPUs: one sentence for the status."""
    name: str = ""
    """Which of several engines, as in "GPU 1"; empty where there is one."""
    fallback: EngineSetting | None = None
    """What to go on with if this backend, which nobody asked for by name, turns out not to work here."""


@dataclass(kw_only=True)
class _Open:
    """A lease in the engine: the rollouts that have come so far, by sample index."""

    lease: Lease
    since: float
    rollouts: dict[int, Completion] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.rollouts) == len(self.lease.samples)


class Generator:
    """Owns the engine child. Run :meth:`run` in a nursery; ``load`` and ``generate`` are called one at a time.

    Leases may be added as soon as ``generate`` was called, and what is said before its stream is open is said then.
    """

    def __init__(
        self,
        setting: EngineSetting,
        *,
        card: RunCard,
        identity: Identity,
        keeper: Keeper,
        spool: Spool,
        journal: Journal,
        feed: Callable[[Event], None],
        on_result: Callable[[bytes], None],
        log: Path | None = None,
    ) -> None:
        """``log``: the file that keeps what the engine prints."""
        self._setting = setting
        self._overseer = Overseer(
            device=setting.declared.device, max_rows=_whole(setting.load.get("max_rows")), log=log
        )
        self._card = card
        self._stop = frozenset(card.stop_tokens)
        self._keeper = keeper
        self._desk = ResultDesk(card, identity=identity, spool=spool, journal=journal)
        self._feed = feed
        self._on_result = on_result
        self._supervisor = Supervisor(self._overseer.listening(setting.spec), self._prepare)
        self._nursery: trio.Nursery | None = None
        self._running = trio.CancelScope()
        self._stream: Stream | None = None
        self._unsaid: list[tuple[str, dict[str, object]]] = []
        self._keys = itertools.count()
        self._open: dict[int, _Open] = {}
        """Leases in the engine, by the key that it sends back."""
        self._loaded_pid: int | None = None
        self._has_loaded = False
        self._last: Beat | None = None
        """Of the stream that is open."""
        self.fingerprint: str = setting.declared.backend

    @property
    def why(self) -> str:
        """Why it generates with this backend."""
        return self._setting.why

    @property
    def state(self) -> str:
        """What the child is doing, in words."""
        state = self._supervisor.state
        return f"{self._setting.name} {state}" if self._setting.name else state

    @property
    def restarts(self) -> int:
        """How often the child had to be started again."""
        return self._supervisor.restarts

    async def run(self) -> None:
        """Keep the child alive until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await self._supervisor.run()

    async def stop(self) -> None:
        """End the child, and keep it ended until :meth:`start`; returns when its memory is free."""
        await self._supervisor.stop()

    def start(self) -> None:
        """Undo :meth:`stop`."""
        self._supervisor.start()

    async def _prepare(self, child: Child) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._watch, child)

    async def _watch(self, child: Child) -> None:
        """Report a child's life, from its first breath to its last words."""
        event(_log, "engine started", backend=self._setting.declared.backend, pid=child.pid)
        self._feed(EngineUp())
        why = await self._overseer.attend(child)
        self._forget()
        self._feed(EngineDown(why=f"the engine to start again: {why}"))

    # --- weights -----------------------------------------------------------------------------------------------------
    async def load(self) -> None:
        """Give the newest verified weights to the child; reports :class:`Loaded`, or ends the child.

        Raises:
            HostError: the model cannot be loaded on this machine at all, by the child's own word.
        """
        child = self._supervisor.child
        if child is None:
            return
        started = trio.current_time()
        try:
            async with self._keeper.reading(deadline_s=LOAD_S) as view:
                which: dict[str, object] = {"image": str(view.image), "root": view.root, "sums": view.sums}
                if child.pid == self._loaded_pid:
                    await child.call("swap", which, deadline_s=LOAD_S)
                else:
                    await child.call("load", self._model() | which, deadline_s=LOAD_S)
            if child.pid != self._loaded_pid:
                self._loaded_pid = child.pid
                await self._describe(child)
        except RollmeshError as error:
            self._loaded_pid = None
            if self._falls_back(child, error):
                return
            hopeless = error.code in HOPELESS or (not self._has_loaded and isinstance(error, Refused))
            if hopeless and child.is_alive:
                raise HostError(f"the engine cannot load {self._card.model.source}: {error.detail}") from error
            self._end(child, error, "load the weights")
            return
        took_s = round(trio.current_time() - started, 2)
        level = logging.DEBUG if self._has_loaded else logging.INFO  # the first load is news, a swap is every minute's
        event(_log, "the engine holds the weights", level=level, version=view.version, load_s=took_s)
        self._has_loaded = True
        self._desk.loaded(view.version, view.root)
        self._feed(Loaded(root=view.root))

    def _falls_back(self, child: Child, error: RollmeshError) -> bool:
        """Go on with the other backend, where this one says itself that it cannot load the model. Not for memory."""
        fallback, backend = self._setting.fallback, self._setting.declared.backend
        if fallback is None or self._has_loaded or isinstance(error, HostError) or not child.is_alive:
            return False
        self._setting = replace(fallback, why=f"{backend} was tried first and failed: {error.detail[:WHY_CHARS]}")
        self._supervisor.spec = self._overseer.listening(fallback.spec)
        self._end(child, error, f"load the weights with {backend}, so {fallback.declared.backend} is taken")
        return True

    def _model(self) -> dict[str, object]:
        return {
            "config_json": self._card.model.config.decode(),
            "layout": self._card.layout.encode(),
            **self._setting.load,
            "max_rows": self._overseer.rows,
            "columns": self._card.limits.prompt_tokens + self._card.limits.new_tokens,
        }

    async def _describe(self, child: Child) -> None:
        """Ask what the engine runs on: for the status page and for the learner's calibration."""
        stats = await child.call("stats", {}, deadline_s=STATS_S)
        told = stats.get("notes")
        notes = told if isinstance(told, dict) else {}
        self._overseer.check_device(notes)
        words = [f"{name} {value}" for name, value in notes.items()]
        self.fingerprint = ", ".join([self._setting.declared.backend, *words])[:MAX_FINGERPRINT_CHARS]

    def _end(self, child: Child, error: RollmeshError, what: str) -> None:
        """A child that failed at its work is not trusted with more."""
        event(_log, f"the engine could not {what}", level=logging.WARNING, code=error.code, why=error.detail)
        self._overseer.failed(error)
        if child.is_alive:
            child.kill(f"could not {what}: {error.detail}")

    # --- the stream --------------------------------------------------------------------------------------------------
    async def generate(self) -> None:
        """Generate what the engine holds and what is added, until it rests; reports each sample and the end.

        Without a child that has weights nothing happens: its death is reported on its own.
        """
        child = self._supervisor.child
        if child is None or child.pid != self._loaded_pid:
            return
        with trio.CancelScope() as self._running:
            try:
                async with child.stream("generate", {}, item_deadline_s=ITEM_S) as self._stream:
                    for verb, body in self._unsaid:
                        self._stream.tell(verb, body)
                    self._unsaid.clear()
                    if self._open:
                        self._overseer.progress.given(trio.current_time())
                    async for item in self._stream:
                        if child.is_alive:  # else its leases have been given up already
                            self._hear(item)
            except RollmeshError as error:
                self._end(child, error, "generate")
                return
            finally:
                self._stream, self._last = None, None
                self._overseer.progress.rested()
                self._unsaid.clear()
        self._feed(EngineRests())

    def add(self, leases: Sequence[Lease]) -> None:
        """Put leases into the engine."""
        requests = []
        for lease in leases:
            key = next(self._keys)
            self._open[key] = _Open(lease=lease, since=trio.current_time())
            requests.append(group_body(self._request(key, lease)))
        self._overseer.progress.given(trio.current_time())
        self._say(pipe.ADD, {"requests": requests})

    def finish(self) -> None:
        """Let the engine rest when all it has is made."""
        self._say(pipe.FINISH, {})

    def hold(self) -> None:
        """Let the engine rest now; what is not made is held for the next :meth:`generate`."""
        self._say(pipe.HOLD, {})

    def abandon(self) -> None:
        """Forget what is in the engine; what is complete is kept."""
        self._forget()
        self._running.cancel()

    def _say(self, verb: str, body: dict[str, object]) -> None:
        if self._stream is None:
            self._unsaid.append((verb, body))
            return
        try:
            self._stream.tell(verb, body)
        except ChildFailed as error:
            child = self._supervisor.child
            if child is not None:
                self._end(child, error, f"be told to {verb}")

    def _forget(self) -> None:
        self._open.clear()
        self._unsaid.clear()

    def _hear(self, body: dict[str, object]) -> None:
        """Take in an item of the stream. Raises ``ChildFailed`` for one that does not fit."""
        match pipe.read_item(body):
            case Beat() as beat:
                self._note_beat(beat)
            case Refusal(key=key, code=code, detail=why):
                held = self._open.pop(key, None)
                if held is not None:
                    event(_log, "the engine does not take a lease", level=logging.WARNING, code=code, why=why)
                    self._feed(LeaseSpoiled(lease_id=held.lease.lease_id))
            case Completion() as done:
                self._place(done)

    def _note_beat(self, beat: Beat) -> None:
        now = trio.current_time()
        self._overseer.progress.heard(now, in_flight=beat.in_flight, tokens=beat.tokens, steps=beat.steps)
        last, self._last = self._last, beat
        if last is not None:
            self._feed(Drew(tokens=max(0, beat.tokens - last.tokens)))

    def _place(self, done: Completion) -> None:
        """Put a rollout into its lease; a complete one is finished in a task of its own, beside the disk."""
        assert self._nursery is not None
        held = self._open.get(done.key)
        wanted = {sample.index for sample in held.lease.samples} if held is not None else set()
        if held is None or done.index not in wanted or done.index in held.rollouts:
            raise ChildFailed(f"the engine answered for a sample that was not asked for ({done.index})")
        held.rollouts[done.index] = done
        self._overseer.progress.moved(trio.current_time())
        if held.is_complete:
            self._supervisor.prove()
            del self._open[done.key]
            self._nursery.start_soon(self._finish, held, trio.current_time() - held.since)
        self._feed(SampleMade(lease_id=held.lease.lease_id))

    def _request(self, key: int, lease: Lease) -> GroupRequest:
        return GroupRequest(
            key=key,
            prompt=lease.prompt_ids,
            samples=tuple(SampleRequest(index=sample.index, seed=sample.seed) for sample in lease.samples),
            max_new_tokens=lease.max_new_tokens,
            stop=self._stop,
        )

    async def _finish(self, held: _Open, took_s: float) -> None:
        """Turn a lease whose samples are all there into a result, and report what became of it."""
        lease_id = held.lease.lease_id
        is_kept = await self._desk.finish(held.lease, held.rollouts, engine=self.fingerprint, took_s=took_s)
        self._feed(LeaseDone(lease_id=lease_id) if is_kept else LeaseSpoiled(lease_id=lease_id))
        if is_kept:
            self._on_result(lease_id)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1
