"""Attackers whose bytes are no messages, or too many: the learner must neither grow nor stumble over them."""

from __future__ import annotations

from contextlib import suppress

import msgpack
import trio
import zstandard
from libp2p.exceptions import BaseLibp2pError

from rollmesh_protocol import limits, streams
from rollmesh_protocol.errors import LinkLost
from rollmesh_protocol.messages import LeaseRequest
from tests.attacks.attack import WireAttack, any_refusal
from tests.attacks.place import Lab
from tests.support.attacker import Attacker, Weight
from tests.support.mesh_hostile import DATA, attack, begin, frame, is_closed, stock_host

BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
"""A quarter of a gigabyte of zeros in some kilobytes."""
MOST_MIB = 40.0
"""What the learner may grow by under messages made to grow it."""


class Garbage(WireAttack):
    """One message to every stream that takes one; the learner must neither grow nor stumble."""

    kind = "flood"
    expects = frozenset({"request.invalid", "request.too_large", "result.schema"})

    def message(self) -> bytes:
        raise NotImplementedError

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        weight = Weight(lab.system.learner.pid)
        message = self.message()
        asked = (streams.HELLO, streams.LEASE, streams.SUBMIT, streams.RETURN, streams.EDGES, streams.PEERS)
        codes = [await any_refusal(one, protocol, message) for protocol in asked]
        grew = weight.growth_mib
        self.outcome.note = f"{len(message):,} bytes to {len(asked)} streams; the learner grew by {grew:.0f} MiB"
        strange = [code for code in codes if code not in self.expects]
        if strange or grew > MOST_MIB:
            return strange[0] if strange else "the learner grew"
        return codes[2]


class Oversized(Garbage):
    name = "message of 100 MB"

    def message(self) -> bytes:
        return bytes(100 << 20)


class Truncated(Garbage):
    name = "truncated message"

    def message(self) -> bytes:
        return LeaseRequest(groups=1, version_held=1, root_held=bytes(32), tokens_per_s=1, waiting_for="").encode()[:-9]


class Nested(Garbage):
    name = "nested message, 10,000 deep"

    def message(self) -> bytes:
        return b"\x91" * 10_000


class Bomb(Garbage):
    name = "compressed bomb"

    def message(self) -> bytes:
        return msgpack.packb({"run": "x", "body": BOMB})


class ManyValues(Garbage):
    name = "65,000 values in one array"

    def message(self) -> bytes:
        return b"\xdc\xff\xff" + b"\xc0" * 65_535


class NoFlowControl(WireAttack):
    """Sends beyond the window of its stream, as fast as it can."""

    name = "flow control ignored"
    kind = "flood"
    expects = frozenset({"connection closed"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        weight = Weight(lab.system.learner.pid)
        async with stock_host() as host:
            connection = await attack(host, lab.join.split(",")[0])
            stream = await begin(connection, streams.SUBMIT)
            beyond = limits.STREAM_WINDOW_BYTES + 60_000
            sent = 0
            with trio.move_on_after(20), suppress(BaseLibp2pError, LinkLost):
                while sent < 200 << 20 and not connection.is_closed:
                    await connection._write_frame(frame(DATA, 0, stream.stream_id, beyond) + bytes(beyond))
                    sent += beyond
            closed = await is_closed(connection)
        self.outcome.note = f"after {sent >> 10:,} KiB; the learner grew by {weight.growth_mib:.0f} MiB"
        return "connection closed" if closed and weight.growth_mib < MOST_MIB else None
