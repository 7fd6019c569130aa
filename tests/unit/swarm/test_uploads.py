"""Upload slots and the rate cap, under a virtual clock."""

from __future__ import annotations

import pytest
import trio

from rollmesh_peer.weights.uploads import UploadRate, UploadSlots
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused


async def upload(slots, peer, log, *, sent=0, num_held=0, seconds=1.0):
    async with slots.slot(peer, sent=sent, num_held=num_held):
        log.append((peer, sent, trio.current_time()))
        await trio.sleep(seconds)


async def test_slots_are_bounded_and_one_peer_gets_half_of_them(autojump_clock):
    slots, log = UploadSlots(4), []
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(upload, slots, "a", log)
        await trio.sleep(0.5)
        assert len(log) == 2  # of four slots
        nursery.start_soon(upload, slots, "b", log)
        await trio.sleep(0.1)
        assert [peer for peer, _, _ in log] == ["a", "a", "b"]


async def test_chunks_never_sent_go_before_chunks_sent_before(autojump_clock):
    slots, log = UploadSlots(1), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upload, slots, "a", log)
        await trio.sleep(0.1)
        for peer, sent in (("b", 3), ("c", 0)):
            nursery.start_soon(lambda peer=peer, sent=sent: upload(slots, peer, log, sent=sent, seconds=0.5))
            await trio.sleep(0.1)
    assert [peer for peer, _, _ in log] == ["a", "c", "b"]


async def test_who_has_the_least_is_served_first(autojump_clock):
    slots, log = UploadSlots(1), []
    async with trio.open_nursery() as nursery:
        for peer, num_held in (("a", 0), ("b", 20), ("c", 3), ("d", 7)):
            nursery.start_soon(lambda peer=peer, n=num_held: upload(slots, peer, log, num_held=n, seconds=0.5))
            await trio.sleep(0.1)
    assert [peer for peer, _, _ in log] == ["a", "c", "d", "b"]


async def test_who_waits_too_long_is_told_that_we_are_busy(autojump_clock):
    slots, log = UploadSlots(1), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: upload(slots, "a", log, seconds=100))
        await trio.sleep(0.1)
        started = trio.current_time()
        with pytest.raises(Refused) as refused:
            await upload(slots, "b", log)
        assert refused.value.code == "request.busy"
        assert trio.current_time() - started == pytest.approx(limits.UPLOAD_WAIT_S)
        nursery.cancel_scope.cancel()


async def test_a_cancelled_waiter_and_a_cancelled_holder_give_everything_back(autojump_clock):
    slots, log = UploadSlots(1), []
    for _ in range(3):
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(upload, slots, "a", log)
                nursery.start_soon(upload, slots, "b", log)
    with trio.fail_after(0.1):
        await upload(slots, "c", log, seconds=0)


async def test_the_cap_holds_over_time(autojump_clock):
    rate = UploadRate(1000.0)
    started = trio.current_time()
    for _ in range(20):
        await rate.spend(500)
    assert trio.current_time() - started == pytest.approx(19 * 0.5)


async def test_beyond_the_cap_we_are_busy(autojump_clock):
    rate = UploadRate(1000.0)
    await rate.spend(1000)
    await rate.spend(3000)
    with pytest.raises(Refused) as refused:
        await rate.spend(1)
    assert refused.value.code == "request.busy"


async def test_no_cap_costs_nothing(autojump_clock):
    rate = UploadRate()
    for _ in range(100):
        await rate.spend(1 << 30)
    assert trio.current_time() == pytest.approx(trio.current_time())
