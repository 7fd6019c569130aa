"""A node with the real engine on a tiny model: base model at hand, catch-up, swap, and what it fetched for that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from rollmesh_peer.children.launch import ChildSpec, kept_environment, python_argv
from rollmesh_peer.children.process import open_child
from rollmesh_peer.testing.fake_learner import make_anchor
from rollmesh_peer.testing.tiny_model import END_OF_TEXT, TURN_END, VOCABULARY, prepare_tiny
from rollmesh_protocol import limits
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.messages import RunCard
from tests.integration.nodes import NodeProcess, open_learner, start_node, wait_for
from tests.unit.node.cards import RUN, make_card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = ("engine.backend=transformers", "engine.threads=1", "engine.device=cpu")


async def _image(folder: Path, image: Path) -> tuple[Layout, bytes]:
    spec = ChildSpec(
        name="base importer",
        argv=python_argv("rollmesh_peer.models.base"),
        environment=kept_environment(os.environ),
        start_deadline_s=120,
    )
    async with open_child(spec) as child:
        answer = await child.call("image", {"folder": str(folder), "image": str(image)}, deadline_s=60)
    raw = answer["layout"]
    assert isinstance(raw, bytes)
    return Layout.decode(raw, limit=limits.CARD_BYTES), image.read_bytes()


async def _tiny_run(tmp_path: Path) -> tuple[RunCard, list[bytes]]:
    """The card of a run on the tiny model, and two images of its layout."""
    images = []
    for seed in (0, 1):
        folder = prepare_tiny(tmp_path / f"model-{seed}", seed=seed)
        layout, image = await _image(folder, tmp_path / f"image-{seed}")
        images.append(image)
    card = make_card(
        config=(tmp_path / "model-0" / "config.json").read_bytes(),
        layout=layout,
        base_root=make_anchor(images[0], run=RUN, layout=layout, version=1).root,
        vocabulary=VOCABULARY,
        stop_tokens=(END_OF_TEXT, TURN_END),
    )
    return card, images


async def _accepted(learner, node: NodeProcess, *, version: int) -> None:
    with trio.fail_after(120):
        await learner.until(
            lambda seen: any(seen.leases[lease_id].version == version for lease_id in seen.heard.accepted)
        )


async def test_a_base_model_at_hand_is_not_downloaded_and_versions_are_followed(tmp_path: Path) -> None:
    card, images = await _tiny_run(tmp_path)
    async with open_learner(tmp_path / "learner", card=card, image=images[0]) as learner:
        settings = (*SETTINGS, f"weights.base={tmp_path / 'model-0'}")
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            await _accepted(learner, node, version=1)
            first = await node.until(lambda status: status.version_held == 1)
            assert first.bytes_from_learner == 0, node.log
            assert first.root_held == card.model.base_root
            await learner.publish(images[1])
            await _accepted(learner, node, version=2)
            second = await node.until(lambda status: status.version_held == 2)
            assert second.bytes_from_learner == card.layout.image_bytes
            assert "transformers" in second.engine and "cpu" in second.engine
            assert (second.rejected, second.last_refusal) == (0, "")
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            again = await node.until(lambda status: status.accepted > 0)
            assert (again.version_held, again.bytes_from_learner) == (2, 0)  # made again from its own disk


async def test_another_model_for_a_base_is_noticed_and_the_run_gives_the_weights(tmp_path: Path) -> None:
    card, images = await _tiny_run(tmp_path)
    async with open_learner(tmp_path / "learner", card=card, image=images[0]) as learner:
        settings = (*SETTINGS, f"weights.base={tmp_path / 'model-1'}")
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            await _accepted(learner, node, version=1)
            status = await node.status()
            assert status.root_held == card.model.base_root
            assert status.bytes_from_learner == card.layout.image_bytes
            assert "the base model is not to be had here" in node.log


async def test_a_model_of_an_unknown_kind_ends_the_node_with_a_sentence(tmp_path: Path) -> None:
    card, images = await _tiny_run(tmp_path)
    odd = make_card(**{**dict(card), "model": card.model.model_copy(update={"config": b'{"model_type": "odd"}'})})
    async with open_learner(tmp_path / "learner", card=odd, image=images[0]) as learner:
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=SETTINGS) as node:
            assert await node.wait(120) == 1
            assert "cannot load" in node.log and "odd" in node.log and "Traceback" not in node.log
            await wait_for(learner, lambda seen: not seen.heard.submitted)


async def test_a_model_that_does_not_fit_is_told_with_the_numbers_and_the_node_stays(tmp_path: Path) -> None:
    card, images = await _tiny_run(tmp_path)
    async with open_learner(tmp_path / "learner", card=card, image=images[0]) as learner:
        settings = (*SETTINGS, "engine.memory_gb=0.1")
        with start_node(tmp_path / "home", learner.mesh.addresses[0], settings=settings) as node:
            with trio.fail_after(120):
                await node.until_logged("out of memory: the engine needs")
            status = await node.until(lambda status: "out of memory" in status.waiting_for)
            assert "0.1 GB are free for it on cpu" in status.waiting_for
            assert status.engine_why == "asked for by name" and node.process.poll() is None
            assert not [request for request in learner.heard.requests if request.groups]
