"""The engine as the daemon sees it: a supervised child that is given verified weights and turns leases into results.

The invariants: weights are loaded only from a view that the keeper holds still; a result that leaves here has passed
:func:`~rollmesh_protocol.rollout.check_result`, is signed, and is in the spool; a load or batch that fails ends the
child, so that the next one starts from a clean process. What to load and to generate is decided elsewhere
(``decisions``); this module reports what happened as its events. It imports no torch: the child does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from rollmesh_node.engine.backend import GroupRequest, Rollout, SampleRequest
from rollmesh_node.engine.pipe import group_body, read_rollout
from rollmesh_node.events import BatchEnded, EngineDown, EngineUp, Event, LeaseDone, LeaseMade, LeaseSpoiled, Loaded
from rollmesh_node.journal import Journal
from rollmesh_node.spool import Spool
from rollmesh_peer.children.launch import ChildSpec
from rollmesh_peer.children.process import Child
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_peer.faults import fault_point
from rollmesh_peer.logging_setup import event
from rollmesh_peer.weights.keeper import Keeper
from rollmesh_protocol import limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import ChildFailed, HostError, Refused, RollmeshError
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import EngineInfo, RunCard
from rollmesh_protocol.rollout import MAX_FINGERPRINT_CHARS, Result, SampleResult, Segment, check_result

LOAD_S: Final = 900.0
"""Deadline of one load: 16 GB from a slow disk, and a model library that compiles kernels."""
STATS_S: Final = 30.0
LEAST_ITEM_S: Final = 60.0
"""Least patience for the next rollout of a batch; else as long as its leases stand."""
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


@dataclass(kw_only=True)
class _Open:
    """A lease in the engine: the rollouts that have come so far, by sample index."""

    lease: Lease
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.rollouts) == len(self.lease.samples)


@dataclass
class _Batch:
    """What the engine is generating, by the key that it sends back."""

    leases: Mapping[int, _Open]
    started: float
    tokens: int = 0

    def place(self, rollout: Rollout) -> _Open:
        """The lease of ``rollout``, which is put into it."""
        held = self.leases.get(rollout.key)
        wanted = {sample.index for sample in held.lease.samples} if held is not None else set()
        if held is None or rollout.index not in wanted or rollout.index in held.rollouts:
            raise ChildFailed(f"the engine answered for a sample that was not asked for ({rollout.index})")
        held.rollouts[rollout.index] = rollout
        self.tokens += len(rollout.tokens)
        return held


class Generator:
    """Owns the engine child. Run :meth:`run` in a nursery; ``load`` and ``generate`` are called one at a time."""

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
    ) -> None:
        self._setting = setting
        self._card = card
        self._stop = frozenset(card.stop_tokens)
        self._identity = identity
        self._keeper = keeper
        self._spool = spool
        self._journal = journal
        self._feed = feed
        self._on_result = on_result
        self._supervisor = Supervisor(setting.spec, self._prepare)
        self._nursery: trio.Nursery | None = None
        self._running = trio.CancelScope()
        self._loaded_pid: int | None = None
        self._has_loaded = False
        self.fingerprint: str = setting.declared.backend

    @property
    def state(self) -> str:
        """What the child is doing, in words."""
        return self._supervisor.state

    @property
    def restarts(self) -> int:
        """How often the child had to be started again."""
        return self._supervisor.restarts

    async def run(self) -> None:
        """Keep the child alive until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await self._supervisor.run()

    async def _prepare(self, child: Child) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._watch, child)

    async def _watch(self, child: Child) -> None:
        """Report a child's life, from its first breath to its last words."""
        event(_log, "engine started", backend=self._setting.declared.backend, pid=child.pid)
        self._feed(EngineUp())
        failure = await child.wait_dead()
        self._feed(EngineDown(why=f"the engine to start again: {failure.detail}"))

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
                if child.pid == self._loaded_pid:
                    await child.call("swap", {"image": str(view.image)}, deadline_s=LOAD_S)
                else:
                    await child.call("load", self._load_body(str(view.image)), deadline_s=LOAD_S)
            if child.pid != self._loaded_pid:
                self._loaded_pid = child.pid
                await self._describe(child)
        except RollmeshError as error:
            self._loaded_pid = None
            hopeless = error.code in HOPELESS or (not self._has_loaded and isinstance(error, Refused))
            if hopeless and child.is_alive:
                raise HostError(f"the engine cannot load {self._card.model.source}: {error.detail}") from error
            self._end(child, error, "load the weights")
            return
        took_s = round(trio.current_time() - started, 2)
        level = logging.DEBUG if self._has_loaded else logging.INFO  # the first load is news, a swap is every minute's
        event(_log, "the engine holds the weights", level=level, version=view.version, load_s=took_s)
        self._has_loaded = True
        self._feed(Loaded(root=view.root))

    def _load_body(self, image: str) -> dict[str, object]:
        return {
            "config_json": self._card.model.config.decode(),
            "layout": self._card.layout.encode(),
            "image": image,
            **self._setting.load,
        }

    async def _describe(self, child: Child) -> None:
        """Ask what the engine runs on: for the status page and for the learner's calibration."""
        stats = await child.call("stats", {}, deadline_s=STATS_S)
        notes = stats.get("notes")
        words = [f"{name} {value}" for name, value in notes.items()] if isinstance(notes, dict) else []
        self.fingerprint = ", ".join([self._setting.declared.backend, *words])[:MAX_FINGERPRINT_CHARS]

    def _end(self, child: Child, error: RollmeshError, what: str) -> None:
        """A child that failed at its work is not trusted with more."""
        event(_log, f"the engine could not {what}", level=logging.WARNING, code=error.code, why=error.detail)
        if child.is_alive:
            child.kill(f"could not {what}: {error.detail}")

    # --- leases ------------------------------------------------------------------------------------------------------
    async def generate(self, leases: Sequence[Lease]) -> None:
        """Generate one batch; reports each lease that is made, and in the end that the batch has ended."""
        batch = _Batch({key: _Open(lease=lease) for key, lease in enumerate(leases)}, started=trio.current_time())
        child = self._supervisor.child
        if child is not None:
            with trio.CancelScope() as self._running:
                try:
                    await self._take_rollouts(child, batch)
                except RollmeshError as error:
                    self._end(child, error, "generate")
        self._feed(BatchEnded(tokens=batch.tokens))

    def cancel_batch(self) -> None:
        """End the running batch; what is complete of it is kept."""
        self._running.cancel()

    async def _take_rollouts(self, child: Child, batch: _Batch) -> None:
        """Call the engine, and finish each lease in a task of its own, so that the engine never waits for the disk."""
        assert self._nursery is not None
        body = {"requests": [group_body(self._request(key, held.lease)) for key, held in batch.leases.items()]}
        patience_s = max(LEAST_ITEM_S, *(held.lease.duration_s for held in batch.leases.values()))
        async with child.stream("generate", body, item_deadline_s=patience_s) as items:
            async for item in items:
                held = batch.place(read_rollout(item))
                if held.is_complete:
                    self._feed(LeaseMade(lease_id=held.lease.lease_id))
                    self._nursery.start_soon(self._finish, held, trio.current_time() - batch.started)

    def _request(self, key: int, lease: Lease) -> GroupRequest:
        return GroupRequest(
            key=key,
            prompt=lease.prompt_ids,
            samples=tuple(SampleRequest(index=sample.index, seed=sample.seed) for sample in lease.samples),
            max_new_tokens=lease.max_new_tokens,
            stop=self._stop,
        )

    async def _finish(self, held: _Open, took_s: float) -> None:
        """Check, sign and keep the result of a lease whose samples are all there."""
        lease = held.lease
        result = Result(
            lease_id=lease.lease_id,
            samples=tuple(sample_result(held.rollouts[sample.index], lease) for sample in lease.samples),
            engine=self.fingerprint,
            generate_s=min(took_s, limits.MAX_LEASE_S),
        )
        self._journal.made(lease, result)
        try:
            check_result(result, lease, vocabulary=self._card.vocabulary, stop_tokens=self._stop)
            body = result.encode()
            if len(body) > limits.RESULT_BYTES:
                raise Refused("request.too_large", f"a result of {len(body)} bytes")
            sealed = seal(body, run=self._card.run, kind="result", identity=self._identity).encode()
            await trio.to_thread.run_sync(self._spool.put, lease.lease_id, sealed)
            fault_point("node.result_durable")
        except (Refused, HostError) as error:
            event(_log, "a result is not fit to be sent", level=logging.ERROR, code=error.code, why=error.detail)
            self._journal.answered(lease.lease_id, code=error.code, detail=error.detail, by="node")
            self._feed(LeaseSpoiled(lease_id=lease.lease_id))
            return
        self._feed(LeaseDone(lease_id=lease.lease_id))
        self._on_result(lease.lease_id)


def sample_result(rollout: Rollout, lease: Lease) -> SampleResult:
    """What is reported of one rollout of the engine."""
    return SampleResult(
        index=rollout.index,
        tokens=rollout.tokens.astype("<u4").tobytes(),
        logprobs=rollout.logprobs.astype("<f4").tobytes(),
        finish=rollout.finish,
        segments=(Segment(first_token=0, root=lease.root),),
    )
