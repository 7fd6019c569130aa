"""The engine's process: verbs from the pipe to a backend. ``python -m rollmesh_node.engine.host [--backend NAME]``.

Invariants: the pipe's descriptors are taken before any library that prints is imported; verbs run one at a time; the
process has no network, no key and no file but the weights image. What a verb raises reaches the supervisor in words,
and a broken CUDA context ends with the process, which the supervisor starts again.

The verbs and their bodies are in :mod:`.pipe`. Not here: how anything is generated (the backends), and what is
remembered of each sample (:mod:`.segments`).
"""

from __future__ import annotations

import os

from rollmesh_peer.children.child import Notes, run_child, take_pipes

if __name__ == "__main__":
    take_pipes()
    # Read when torch loads its OpenMP: threads that wait must not spin (on busy cores that was 20 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollmesh_node.engine import pipe
from rollmesh_node.engine.backend import Backend, GroupRequest, Weights
from rollmesh_node.engine.pipe import THREADS_ENV, Beat, Body, Refusal
from rollmesh_node.engine.scripted_backend import Script, ScriptedBackend
from rollmesh_node.engine.segments import Book
from rollmesh_peer.bit_sums import Sums, read_sums
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, RollmeshError
from rollmesh_protocol.layout import Layout

if TYPE_CHECKING:
    from rollmesh_peer.models.loader import Arithmetic

BACKENDS: Final = ("transformers", "vllm", "scripted")
BEAT_S: Final = 1.0
"""A beat is due so long after the last one; a step takes up to ``backend.STEP_S`` more."""
_LAST_WORD_S: Final = 0.2
"""Between the answer to ``shutdown`` and the end, for the answer to leave."""


class Host:
    """One backend behind the verbs."""

    def __init__(self, *, backend: str, script: Mapping[str, float | int | None]) -> None:
        self._name = backend
        self._script = script
        self._backend: Backend | None = None
        self._layout: Layout | None = None
        self._root = b""
        self._book = Book()

    def load(self, body: Body) -> Body:
        """Make the backend at the first call, then give it weights."""
        layout, config = body.get("layout"), body.get("config_json")
        if not isinstance(layout, bytes) or not isinstance(config, str):
            raise ChildFailed("the engine was told to load without a layout or a config", code="child.request")
        started = time.perf_counter()
        self._layout = Layout.decode(layout, limit=limits.CARD_BYTES)
        weights = Weights(
            config=json.loads(config),
            layout=self._layout,
            image=Path(str(body.get("image"))),
            sums=self._sums(body),
        )
        if self._backend is None:
            self._backend = self._make(body | self._planned(body, weights))
        self._backend.load(weights)
        self._hold_root(body)
        return {"load_s": time.perf_counter() - started}

    def swap(self, body: Body) -> Body:
        """Take other weights of the same layout."""
        started = time.perf_counter()
        self._ready().swap(Path(str(body.get("image"))), self._sums(body))
        self._hold_root(body)
        return {"load_s": time.perf_counter() - started}

    def generate(self, body: Body, notes: Notes) -> Iterator[Body]:
        """Stream finished rollouts and beats until told to end; see :mod:`.pipe`."""
        return _Session(self._ready(), self._book, root=self._root).run(body, notes)

    def stats(self, _: Body) -> Body:
        """Return the totals; empty before the first load."""
        return asdict(self._backend.stats()) if self._backend else {}

    def shutdown(self, _: Body) -> Body:
        """Answer, then end."""
        threading.Timer(_LAST_WORD_S, os._exit, args=(0,)).start()
        return {}

    def _hold_root(self, body: Body) -> None:
        self._root = pipe.read_root(body)
        if not self._root:
            self._book.forget()  # what cannot be told apart cannot go on

    def _sums(self, body: Body) -> tuple[Sums, ...] | None:
        packed = body.get("sums")
        if self._layout is None or not isinstance(packed, bytes) or not packed:
            return None
        return read_sums(packed, layout=self._layout)

    def _ready(self) -> Backend:
        if self._backend is None:
            raise ChildFailed("the engine has no weights", code="child.weights")
        return self._backend

    def _planned(self, body: Body, weights: Weights) -> Body:
        """What the memory plan changes of a load call, before anything is allocated.

        Raises ``Refused`` for a config of another layout, ``HostError`` for what does not fit.
        """
        if self._name == "scripted":
            return {}
        from rollmesh_node.engine.measured_plan import plan_here
        from rollmesh_peer.models.loader import require_layout

        require_layout(weights.config, layout=weights.layout)
        plan = plan_here(body, config=weights.config, layout=weights.layout)
        return {"max_rows": plan.rows} if plan is not None else {}

    def _make(self, body: Body) -> Backend:
        if self._name == "scripted":
            return ScriptedBackend(Script(**self._script))  # type: ignore[arg-type]
        threads = _whole(body, "threads") or int(os.environ.get(THREADS_ENV) or 0)
        max_rows, device = _whole(body, "max_rows"), str(body.get("device") or "auto")
        dtype: Arithmetic = "float32" if body.get("dtype") == "float32" else "bfloat16"
        if self._name == "vllm":
            from rollmesh_node.engine.vllm_backend import VllmBackend

            return VllmBackend(threads=threads, max_rows=max_rows, device=device, dtype=dtype, gpus=_gpus(body))
        from rollmesh_node.engine.transformers_backend import TransformersBackend

        is_compiled = body.get("compile") is True
        return TransformersBackend(threads=threads, max_rows=max_rows, device=device, dtype=dtype, compile=is_compiled)


class _Session:
    """One ``generate``: from the first request to the end that was asked for."""

    def __init__(self, backend: Backend, book: Book, *, root: bytes) -> None:
        self._backend = backend
        self._book = book
        self._root = root
        self._is_finishing = False
        self._is_held = False

    def run(self, body: Body, notes: Notes) -> Iterator[Body]:
        """Yield items. Left early, by the daemon or by an error, it abandons everything."""
        try:
            self._backend.add(self._book.reopen(self._root))
            for request in pipe.read_groups(body):
                self._add(request)
            self._is_finishing = body.get("finish") is True
            yield self._beat()
            beaten = time.perf_counter()
            while not notes.is_cancelled:
                is_idle = not self._backend.in_flight and not self._is_finishing
                for verb, said in notes.take(wait_s=BEAT_S if is_idle else 0.0):
                    yield from self._obey(verb, said)
                if self._is_held:
                    self._book.hold(self._backend.drop())
                    break
                if self._backend.in_flight:
                    for rollout in self._backend.step():
                        yield pipe.rollout_item(self._book.finish(rollout, now=time.perf_counter()))
                elif self._is_finishing:
                    break
                if time.perf_counter() - beaten >= BEAT_S:
                    yield self._beat()
                    beaten = time.perf_counter()
            yield self._beat()
        finally:
            if not self._is_held:
                self._abandon()

    def _obey(self, verb: str, said: Body) -> Iterator[Body]:
        match verb:
            case pipe.ADD:
                for request in pipe.read_groups(said):
                    try:
                        self._add(request)
                    except RollmeshError as error:
                        yield pipe.refusal_item(Refusal(key=request.key, code=error.code, detail=error.detail))
            case pipe.FINISH:
                self._is_finishing = True
            case pipe.HOLD:
                self._is_held = True
            case _:
                raise ChildFailed(f"the engine was told to {verb!r}", code="child.request")

    def _add(self, request: GroupRequest) -> None:
        if self._book.has(request):
            raise ChildFailed(f"the engine was given a sample twice (request {request.key})", code="child.request")
        self._backend.add([request])
        self._book.add(request, now=time.perf_counter())

    def _beat(self) -> Body:
        stats = self._backend.stats()
        return pipe.beat_item(Beat(in_flight=self._backend.in_flight, tokens=stats.tokens, steps=stats.steps))

    def _abandon(self) -> None:
        self._book.forget()
        with contextlib.suppress(Exception):  # where a step has failed, that is what must be told
            self._backend.drop()


def _gpus(body: Body) -> tuple[int, ...]:
    numbers = body.get("gpus") or []
    if not isinstance(numbers, list) or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ChildFailed(f"the engine was given gpus = {numbers!r}", code="child.request")
    return tuple(numbers)


def _whole(body: Body, name: str) -> int:
    value = body.get(name) or 0
    if not isinstance(value, int) or value < 0:
        raise ChildFailed(f"the engine was given {name} = {value!r}", code="child.request")
    return value


def main(arguments: Sequence[str]) -> None:
    """Serve until the daemon goes away."""
    parser = argparse.ArgumentParser(prog="rollmesh_node.engine.host")
    parser.add_argument("--backend", choices=BACKENDS, default="transformers")
    parser.add_argument("--script", type=json.loads, default={}, help="fields of scripted_backend.Script, as JSON")
    chosen = parser.parse_args(arguments)
    host = Host(backend=chosen.backend, script=chosen.script)
    run_child(
        {"load": host.load, "swap": host.swap, "stats": host.stats, "shutdown": host.shutdown},
        talks={"generate": host.generate},
    )


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
