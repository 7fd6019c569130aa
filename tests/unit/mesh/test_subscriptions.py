"""A subscriber's end of a topic: the newest are kept, and nobody is made to wait."""

from __future__ import annotations

import pytest
import trio

from rollmesh_peer.mesh.subscriptions import Subscription
from rollmesh_protocol import limits


async def test_the_newest_are_kept():
    subscription = Subscription("topic", accept=lambda _author, _message: True)
    count = limits.GOSSIP_BUFFER + 10
    for number in range(count):
        assert subscription.offer("author", b"%d" % number)
    kept = [subscription.receive.receive_nowait() for _ in range(limits.GOSSIP_BUFFER)]
    assert kept == [b"%d" % number for number in range(10, count)]
    with pytest.raises(trio.WouldBlock):
        subscription.receive.receive_nowait()


async def test_a_subscriber_that_left_goes_on_judging():
    subscription = Subscription("topic", accept=lambda author, _message: author == "learner")
    subscription.receive.close()
    for _ in range(2 * limits.GOSSIP_BUFFER):
        assert subscription.offer("learner", b"x")
    assert not subscription.offer("stranger", b"x")


async def test_a_judge_that_fails_refuses(caplog):
    def broken(_author, _message):
        raise KeyError("a fault of ours")

    assert not Subscription("topic", accept=broken).offer("author", b"x")
    assert "a fault of ours" in caplog.text
    caplog.clear()
