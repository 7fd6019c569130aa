"""The engine's process: verbs from the pipe to a backend. ``python -m rollmesh_node.engine.host [--backend NAME]``.

Invariants: the pipe's descriptors are taken before any library that prints is imported; verbs run one at a time; the
process has no network, no key and no file but the weights image. What a verb raises reaches the supervisor in words,
and a broken CUDA context ends with the process, which the supervisor starts again.

The verbs and their bodies are in :mod:`.pipe`. Not here: how anything is generated (the backends).
"""

from __future__ import annotations

import os

from rollmesh_peer.children.child import run_child, take_pipes

if __name__ == "__main__":
    take_pipes()
    # Read when torch loads its OpenMP: threads that wait must not spin (on busy cores that was 20 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rollmesh_node.engine.backend import Backend, Weights
from rollmesh_node.engine.pipe import THREADS_ENV, Body, read_group, rollout_body
from rollmesh_node.engine.scripted_backend import Script, ScriptedBackend
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.layout import Layout

BACKENDS: Final = ("transformers", "scripted")
_LAST_WORD_S: Final = 0.2
"""Between the answer to ``shutdown`` and the end, for the answer to leave."""


class Host:
    """One backend behind the verbs."""

    def __init__(self, *, backend: str, script: Mapping[str, float | int | None]) -> None:
        self._name = backend
        self._script = script
        self._backend: Backend | None = None

    def load(self, body: Body) -> Body:
        """Make the backend at the first call, then give it weights."""
        layout, config = body.get("layout"), body.get("config_json")
        if not isinstance(layout, bytes) or not isinstance(config, str):
            raise ChildFailed("the engine was told to load without a layout or a config", code="child.request")
        started = time.perf_counter()
        if self._backend is None:
            self._backend = self._make(body)
        self._backend.load(
            Weights(
                config=json.loads(config),
                layout=Layout.decode(layout, limit=limits.CARD_BYTES),
                image=Path(str(body.get("image"))),
            )
        )
        return {"load_s": time.perf_counter() - started}

    def swap(self, body: Body) -> Body:
        """Take other weights of the same layout."""
        started = time.perf_counter()
        self._ready().swap(Path(str(body.get("image"))))
        return {"load_s": time.perf_counter() - started}

    def generate(self, body: Body) -> Iterator[Body]:
        """Stream finished rollouts."""
        requests = body.get("requests")
        if not isinstance(requests, list) or not requests:
            raise ChildFailed("the engine was told to generate nothing", code="child.request")
        return map(rollout_body, self._ready().generate([read_group(request) for request in requests]))

    def stats(self, _: Body) -> Body:
        """Return the totals; empty before the first load."""
        return asdict(self._backend.stats()) if self._backend else {}

    def shutdown(self, _: Body) -> Body:
        """Answer, then end."""
        threading.Timer(_LAST_WORD_S, os._exit, args=(0,)).start()
        return {}

    def _ready(self) -> Backend:
        if self._backend is None:
            raise ChildFailed("the engine has no weights", code="child.weights")
        return self._backend

    def _make(self, body: Body) -> Backend:
        if self._name == "scripted":
            return ScriptedBackend(Script(**self._script))  # type: ignore[arg-type]
        from rollmesh_node.engine.transformers_backend import TransformersBackend

        return TransformersBackend(
            threads=_whole(body, "threads") or int(os.environ.get(THREADS_ENV) or 0),
            max_rows=_whole(body, "max_rows"),
            device=str(body.get("device") or "auto"),
            dtype="float32" if body.get("dtype") == "float32" else "bfloat16",
        )


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
        {
            "load": host.load,
            "swap": host.swap,
            "generate": host.generate,
            "stats": host.stats,
            "shutdown": host.shutdown,
        }
    )


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
