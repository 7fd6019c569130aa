"""A backend that was chosen automatically and cannot load the model here gives way to the other one."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import trio

from rollmesh_node.config import Engine
from rollmesh_node.engine_setting import choose_engine
from rollmesh_node.events import EngineUp, Event, Loaded
from rollmesh_node.generator import Generator
from rollmesh_peer.children.launch import ChildSpec, kept_environment
from rollmesh_protocol.messages import EngineInfo
from tests.unit.node.cards import NODE, make_card

BROKEN = """\
from rollmesh_peer.children.child import run_child

def load(body):
    raise ImportError("libcudart.so.13: cannot open shared object file")

run_child({"load": load})
"""


class Keeper:
    """Weights that never change."""

    def __init__(self, image: Path) -> None:
        self._image = image

    @contextlib.asynccontextmanager
    async def reading(self, *, deadline_s: float):
        yield SimpleNamespace(image=self._image, root=bytes(32), version=1, sums=b"")


async def test_the_other_backend_is_taken_and_the_reason_told(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"weights")
    scripted = choose_engine(Engine(backend="scripted"), environ=os.environ)
    broken = replace(
        scripted,
        spec=ChildSpec(
            name="engine", argv=(sys.executable, "-P", "-c", BROKEN), environment=kept_environment(os.environ)
        ),
        declared=EngineInfo(backend="vllm", dtype="bfloat16", device="none"),
        fallback=scripted,
    )
    heard: list[Event] = []
    loaded = trio.Event()

    def feed(event: Event) -> None:
        heard.append(event)
        if isinstance(event, EngineUp):
            nursery.start_soon(generator.load)
        if isinstance(event, Loaded):
            loaded.set()

    generator = Generator(
        broken, card=make_card(), identity=NODE, keeper=Keeper(tmp_path / "image"), spool=None, journal=None, feed=feed,
        on_result=lambda _: None, log=tmp_path / "engine.log",
    )  # type: ignore[arg-type]  # fmt: skip
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generator.run)
            await loaded.wait()
            nursery.cancel_scope.cancel()
    assert generator.fingerprint.startswith("scripted")
    assert "vllm was tried first" in generator.why and "libcudart.so.13" in generator.why
    assert "ImportError" in (tmp_path / "engine.log").read_text()
