"""Joining: whose card it is, what a refusal means, and that membership is renewed without anyone acting."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from rollmesh_node import joining
from rollmesh_node.joining import Membership, open_card, pin_card, read_card
from rollmesh_protocol import codec
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.messages import Head, LeaseRequest
from rollmesh_protocol.verdicts.drift import DriftTest
from rollmesh_protocol.verdicts.judging import Judging
from tests.unit.node.cards import LEARNER, NODE, RUN, STRANGER, make_card
from tests.unit.node.world import SOON_S, World, hello, open_world

CALIBRATED = make_card(checks=Judging(drift=DriftTest(clip=0.3, reference=0.005, exponent=4.0)).as_checks)
STRICTER = make_card(checks=Judging(drift=DriftTest(clip=0.3, reference=0.001, exponent=9.0)).as_checks)


def sealed(card=None, *, by=LEARNER, run=RUN, kind="card") -> bytes:
    return seal((card or make_card()).encode(), run=run, kind=kind, identity=by).encode()


def test_a_card_is_the_word_of_the_learner_of_the_join_line() -> None:
    assert open_card(sealed(), learner=LEARNER.peer) == make_card()
    for forged, code in (
        (sealed(by=STRANGER), "envelope.key"),
        (sealed(run="another"), "envelope.run"),
        (sealed(kind="pass"), "envelope.kind"),
        (sealed(make_card(learner=STRANGER.peer)), "envelope.key"),
        (sealed()[:-2], "request.invalid"),
        (b"\0" * 100, "request.invalid"),
    ):
        with pytest.raises(Refused) as caught:
            open_card(forged, learner=LEARNER.peer)
        assert caught.value.code == code


def test_a_card_is_pinned_for_the_life_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "card"
    pin_card(make_card(), file)
    pin_card(make_card(), file)
    with pytest.raises(Refused, match="another card for the run"):
        pin_card(make_card(new_tokens=31), file)
    assert read_card(file) == make_card()


def test_a_card_that_judges_otherwise_replaces_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "card"
    assert read_card(file) is None
    for card in (make_card(), CALIBRATED, STRICTER, make_card()):
        pin_card(card, file)
        assert read_card(file) == card
    pin_card(CALIBRATED, file)
    with pytest.raises(Refused, match="another card for the run"):
        pin_card(make_card(new_tokens=31, checks=STRICTER.checks), file)
    assert read_card(file) == CALIBRATED


def test_a_card_of_before_there_were_checks_is_still_the_run(tmp_path: Path) -> None:
    file = tmp_path / "card"
    before = make_card().model_dump()
    del before["checks"]
    file.write_bytes(codec.pack(before))
    pin_card(CALIBRATED, file)
    assert read_card(file) == CALIBRATED


def test_a_card_that_cannot_be_replaced_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "card"
    pin_card(make_card(), file)

    def refuse(path: Path, body: bytes) -> None:
        raise HostError(f"{path}: the disk is full")

    monkeypatch.setattr(joining, "write_file", refuse)
    pin_card(CALIBRATED, file)
    assert read_card(file) == make_card()
    with pytest.raises(HostError, match="disk is full"):
        pin_card(make_card(), tmp_path / "other")


def test_a_damaged_card_is_told(tmp_path: Path) -> None:
    file = tmp_path / "card"
    file.write_bytes(make_card().encode()[:-3])
    with pytest.raises(HostError, match="is damaged"):
        pin_card(make_card(), file)


async def test_join_checks_the_card_and_keeps_the_pass(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        with trio.fail_after(SOON_S):
            card = await world.membership.join()
        assert card == make_card() and world.checked == world.pinned == [card]
        assert world.membership.is_admitted and world.membership.waiting_for == ""
        assert world.uplink.head == world.learner.head
        assert world.membership.admission


async def test_a_card_that_the_volunteer_refuses_ends_the_joining(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:

        def refuse(card) -> None:
            raise Refused("card.limits", "too much")

        membership = Membership(world.uplink, node=NODE.peer, hello=hello, check=refuse, pin=refuse)
        with pytest.raises(Refused, match="too much"), trio.fail_after(SOON_S):
            await membership.join()
        assert not membership.is_admitted


async def test_a_pass_for_somebody_else_is_not_taken(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        membership = Membership(
            world.uplink, node=STRANGER.peer, hello=hello, check=lambda card: None, pin=lambda card: None
        )
        with pytest.raises(Refused, match="another peer"), trio.fail_after(SOON_S):
            await membership.join()


async def test_a_node_that_was_forgotten_says_hello_again(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await _member(world)
        world.learner.forget(NODE.peer)
        request = LeaseRequest(groups=0, version_held=0, root_held=None, tokens_per_s=0, waiting_for="")
        with pytest.raises(Refused) as caught:
            await world.uplink.lease(request)
        assert caught.value.code == "node.not_admitted"
        world.membership.renew()
        with trio.fail_after(SOON_S):
            await world.membership.wait_admitted()
        await world.uplink.lease(request)
        assert len(world.learner.heard.hellos) == 2


async def test_hello_is_said_again_after_a_lost_link(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await _member(world)
        world.network.cut(LEARNER.peer, NODE.peer)
        with trio.fail_after(SOON_S):
            while world.membership.is_admitted:
                await trio.lowlevel.checkpoint()
        assert "lost" in world.membership.waiting_for or "answer" in world.membership.waiting_for
        world.network.heal(LEARNER.peer, NODE.peer)
        await world.until(lambda learner: len(learner.heard.hellos) == 2)
        with trio.fail_after(SOON_S):
            await world.membership.wait_admitted()


async def test_a_restarted_learner_with_another_run_is_not_followed(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        with trio.fail_after(SOON_S):
            await world.membership.join()
        world.learner.script.card_bytes = sealed(make_card(run="another"), run="another")
        world.membership.renew()
        with pytest.raises(Refused, match="another run"), trio.fail_after(SOON_S):
            await world.membership.keep()


async def test_a_learner_that_was_calibrated_meanwhile_is_followed(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await _member(world)
        world.learner.script.card_bytes = sealed(CALIBRATED)
        world.membership.renew()
        with trio.fail_after(SOON_S):
            await world.membership.wait_admitted()
        assert world.membership.card == CALIBRATED
        assert world.checked == [make_card()] and world.pinned == [make_card(), CALIBRATED]


async def test_an_old_head_never_replaces_a_newer_one(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        heads: list[Head] = []
        with trio.fail_after(SOON_S):
            await world.membership.join()
        world.uplink.listen(heads.append)
        world.learner.head = Head(version=0, step=0, root=bytes(32))
        await world.uplink.hello(hello())
        assert heads == [world.uplink.head] and heads[0].version == 1


async def test_a_learner_that_refuses_for_good_is_believed(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        world.learner.script.hello_refusal = Refused("node.allowlist", "not on the list")
        with pytest.raises(Refused) as caught, trio.fail_after(SOON_S):
            await world.membership.join()
        assert caught.value.code == "node.allowlist" and "rollmesh node id" in caught.value.advice


async def test_a_full_run_is_asked_again(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        world.learner.script.hello_refusal = Refused("run.full")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.membership.join)
            await world.until(lambda learner: len(learner.heard.hellos) >= 2)
            assert "all the nodes that it takes" in world.membership.waiting_for
            world.learner.script.hello_refusal = None
            with trio.fail_after(SOON_S):
                await world.membership.wait_admitted()


async def _member(world: World) -> None:
    with trio.fail_after(SOON_S):
        await world.membership.join()
    world.nursery.start_soon(world.membership.keep)
