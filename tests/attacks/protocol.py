"""Attackers that say what no honest node says. Each must be refused with its code, or must have gained nothing."""

from __future__ import annotations

import math
import secrets
from contextlib import suppress

import msgpack
import numpy as np
import trio
import zstandard
from libp2p.exceptions import BaseLibp2pError

from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import LeaseAnswer, LeaseRequest
from rollmesh_protocol.rollout import Segment
from tests.attacks.attack import ASK_AGAIN_S, WireAttack, hand_in, lease_for, reason_of
from tests.attacks.engine import order_of
from tests.attacks.place import Lab
from tests.support.attacker import Attacker, Weight, open_attacker, result_of, sample_of
from tests.support.mesh_hostile import DATA, attack, begin, frame, is_closed, stock_host

BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
"""A quarter of a gigabyte of zeros in some kilobytes."""
MOST_MIB = 40.0
"""What the learner may grow by under messages made to grow it."""
PATIENCE_S = 150.0


async def refusal(one: Attacker, sealed: bytes) -> str:
    """The code for a submission; the offence behind a quarantine."""
    try:
        receipt = await one.send(sealed)
    except Refused as refused:
        return reason_of(refused) if refused.code == "node.quarantined" else refused.code
    return receipt.code or "accepted"


async def any_refusal(one: Attacker, protocol: str, request: bytes) -> str:
    """The code for any request; what is answered is said to be."""
    try:
        await one.ask(protocol, request)
    except Refused as refused:
        return refused.code
    return "answered"


# --- samples that break a rule ---------------------------------------------------------------------------------------
class BadSample(WireAttack):
    """The last of an otherwise well-formed result's samples breaks one rule."""

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        raise NotImplementedError

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        samples = [sample_of(lease, sample.index) for sample in lease.samples]
        samples[-1] = sample_of(lease, samples[-1].index, **self.changes(lease, lab))
        return await refusal(one, one.seal(result_of(lease, samples).encode()))


class NotANumber(BadSample):
    name = "NaN log-probability"
    expects = frozenset({"result.logprob"})

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        return {"logprobs": [-1.0] * (lease.max_new_tokens - 1) + [math.nan]}


class Infinite(BadSample):
    name = "infinite log-probability"
    expects = frozenset({"result.logprob"})

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        return {"logprobs": [-1.0] * (lease.max_new_tokens - 1) + [-math.inf]}


class AboveZero(BadSample):
    name = "log-probability above zero"
    expects = frozenset({"result.logprob"})

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        return {"logprobs": [0.01] * lease.max_new_tokens}


class OutOfVocabulary(BadSample):
    name = "token id out of range"
    expects = frozenset({"result.tokens"})

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        return {"tokens": [65] * (lease.max_new_tokens - 1) + [lab.vocabulary]}


class TooLong(BadSample):
    name = "more tokens than leased"
    expects = frozenset({"result.length"})

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        return {"tokens": [65] * (lease.max_new_tokens + 1)}


class FalseFinish(BadSample):
    name = "cut short and called finished"
    expects = frozenset({"result.finish"})

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        return {"tokens": [65] * 5, "finish": "stop"}


class OtherRoot(BadSample):
    name = "weights that nobody leased"
    expects = frozenset({"result.root"})

    def changes(self, lease: Lease, lab: Lab) -> dict[str, object]:
        return {"segments": (Segment(first_token=0, root=b"\x07" * 32),)}


class MissingSamples(WireAttack):
    name = "only the samples that one likes"
    expects = frozenset({"result.samples"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        samples = [sample_of(lease, sample.index) for sample in lease.samples[:-1]]
        return await refusal(one, one.seal(result_of(lease, samples).encode()))


class OwnReward(WireAttack):
    name = "reward field injected"
    expects = frozenset({"result.schema"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        fields = result_of(await lease_for(one, lab)).model_dump()
        return await refusal(one, one.seal(msgpack.packb({**fields, "reward": 1.0})))


# --- signatures ------------------------------------------------------------------------------------------------------
class Sealed(WireAttack):
    """A good result in a bad envelope."""

    expects = frozenset({"result.signature"})

    def seal(self, one: Attacker, body: bytes) -> bytes:
        raise NotImplementedError

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        return await refusal(one, self.seal(one, result_of(await lease_for(one, lab)).encode()))


class Forged(Sealed):
    name = "forged signature"

    def seal(self, one: Attacker, body: bytes) -> bytes:
        good = Envelope.decode(one.seal(body), limit=limits.RESULT_BYTES)
        return good.model_copy(update={"sig": secrets.token_bytes(64)}).encode()


class Reused(Sealed):
    name = "signature of another result"

    def seal(self, one: Attacker, body: bytes) -> bytes:
        good = Envelope.decode(one.seal(b"another body"), limit=limits.RESULT_BYTES)
        return good.model_copy(update={"body": body}).encode()


class OtherKey(Sealed):
    name = "signed by another key"

    def seal(self, one: Attacker, body: bytes) -> bytes:
        return one.seal(body, by=Identity(secrets.token_bytes(32)))


class WrongKind(Sealed):
    name = "signed as another kind"

    def seal(self, one: Attacker, body: bytes) -> bytes:
        return one.seal(body, kind="lease")


class OtherRun(Sealed):
    name = "signed for another run"

    def seal(self, one: Attacker, body: bytes) -> bytes:
        return one.seal(body, run="another-run")


# --- leases ----------------------------------------------------------------------------------------------------------
class Replayed(WireAttack):
    """A good result twice, then another for the same lease."""

    name = "replayed result, then another one"
    expects = frozenset({"lease.reused"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        drawn = await lab.forge.draw(order_of(lease, stop=lab.stop))
        first = await hand_in(one, lease, drawn, lab)
        again = await hand_in(one, lease, drawn, lab)
        self.outcome.tokens = sum(len(sample.tokens) for sample in drawn)
        self.outcome.note = "the same bytes got the same receipt" if first == again else "the replay counted"
        return await refusal(one, one.seal(result_of(lease).encode()))


class Stolen(WireAttack):
    """Another node's result, opened and signed again by the thief."""

    name = "result copied from another node"
    expects = frozenset({"lease.other_node"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        async with open_attacker(lab.join) as other:
            lease = await lease_for(other, lab)
            drawn = await lab.forge.draw(order_of(lease, stop=lab.stop))
            samples = [
                sample_of(
                    lease, sample.index, tokens=sample.tokens, logprobs=sample.logprobs,
                    finish="stop" if int(sample.tokens[-1]) in lab.stop else "length",
                )
                for sample in drawn
            ]  # fmt: skip
            body = result_of(lease, samples).encode()
            whole = await refusal(one, other.seal(body))
            self.outcome.note = f"with the victim's envelope: {whole}"
            code = await refusal(one, one.seal(body))
            receipt = await other.send(other.seal(body))
            self.outcome.note += f"; the victim's own was {'accepted' if receipt.code is None else receipt.code}"
        return code


class OthersLease(WireAttack):
    name = "lease of another node"
    expects = frozenset({"lease.other_node"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        async with open_attacker(lab.join) as other:
            return await refusal(one, one.seal(result_of(await lease_for(other, lab)).encode()))


class UnknownLease(WireAttack):
    name = "lease that never was"
    expects = frozenset({"lease.unknown"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        made_up = lease.model_copy(update={"lease_id": secrets.token_bytes(16)})
        return await refusal(one, one.seal(result_of(made_up).encode()))


class Expired(WireAttack):
    """Held until it runs out and others have filled it; then a result for it."""

    name = "expired lease"
    expects = frozenset({"lease.expired", "result.stale"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        with trio.move_on_after(PATIENCE_S):
            while not lab.rows(
                "SELECT 1 FROM rollouts WHERE group_id = ? AND sample = ? AND node != ?",
                lease.group, lease.samples[0].index, one.peer,
            ):  # fmt: skip
                await trio.sleep(2)
        one.held.clear()
        return await refusal(one, one.seal(result_of(lease).encode()))


class Abandoning(WireAttack):
    """Takes leases and lets them run out: it is given none for a while, and its samples go to others."""

    name = "abandoning leases"

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        ids = []
        with trio.move_on_after(PATIENCE_S):
            for _ in range(2):
                lease = await lease_for(one, lab)
                ids.append(lease.lease_id)
                while lab.rows("SELECT 1 FROM leases WHERE lease_id = ? AND state = 'open'", lease.lease_id):
                    await trio.sleep(2)
            one.held.clear()
            given = [len((await one.request_work(1, root=lab.studio.newest)).leases) for _ in range(5)]
            self.outcome.note = f"after two leases ran out, {sum(given)} of 5 requests were answered with work"
            self.outcome.no_effect = not sum(given)
        return None


class Hoarding(WireAttack):
    """Asks for all it can get, and claims to be very fast."""

    name = "lease hoarding, speed claimed"

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        await lease_for(one, lab)
        for _ in range(20):
            await one.request_work(16, root=lab.studio.newest)
        held = sum(len(lease.samples) for lease in one.held.values())
        self.outcome.note = f"21 requests for up to 16 groups gave {held} samples, one group"
        self.outcome.no_effect = held <= lab.studio.card.limits.samples_per_group
        return None


class Slowness(WireAttack):
    """Claims to be slow, to have leases that stand longer."""

    name = "slowness claimed"

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        durations = []
        for speed in (1e-6, 1e6):
            while True:
                asked = LeaseRequest(
                    groups=1, version_held=1, root_held=lab.studio.newest, tokens_per_s=speed, waiting_for=""
                )
                raw = await one.ask(streams.LEASE, asked.encode())
                leases = LeaseAnswer.decode(raw, limit=limits.LEASES_BYTES).leases
                if leases:
                    break
                await trio.sleep(ASK_AGAIN_S)
            lease = one.open_lease(leases[0])
            durations.append(lease.duration_s)
            await one.give_back([lease], code="node.weights")
            await trio.sleep(0.1)
        slow, fast = durations
        self.outcome.note = f"leases of {slow:g} s at 1e-6 tokens/s and of {fast:g} s at 1e6"
        self.outcome.no_effect = slow == fast
        return None


class Withholding(WireAttack):
    """Makes honest samples and hands in only leases whose reward it likes; the others go back."""

    name = "withholding bad samples"

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        withheld: list[Lease] = []
        rewards: list[float] = []
        for _ in range(8):
            lease = await lease_for(one, lab)
            drawn = await lab.forge.draw(order_of(lease, stop=lab.stop))
            rewards.append(float(np.mean([lab.reward(sample) for sample in drawn])))
            if rewards[-1] >= np.mean(rewards):
                await hand_in(one, lease, drawn, lab)
                self.outcome.tokens += sum(len(sample.tokens) for sample in drawn)
            else:
                withheld.append(lease)
                await one.give_back([lease])
        places = [(lease.group, sample) for lease in withheld for sample in lease.samples]
        filled = 0
        with trio.move_on_after(PATIENCE_S):
            while filled < len(places):
                await trio.sleep(2)
                filled = sum(self._is_filled(one, lab, group, sample) for group, sample in places)
        self.outcome.note = f"{filled} of {len(places)} withheld samples were made by others with the same seeds"
        self.outcome.no_effect = filled == len(places)
        return None

    @staticmethod
    def _is_filled(one: Attacker, lab: Lab, group: int, sample) -> bool:
        rows = lab.rows("SELECT node, seed FROM rollouts WHERE group_id = ? AND sample = ?", group, sample.index)
        return any(node != one.peer and seed == sample.seed.to_bytes(8, "little") for node, seed in rows)


class ComingBack(WireAttack):
    """In quarantine, the same key connects again."""

    name = "coming back after quarantine"
    expects = frozenset({"node.quarantined"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        with suppress(Refused):
            for _ in range(10):
                await any_refusal(one, streams.SUBMIT, b"junk")
        async with open_attacker(lab.join, identity=one.identity, hello=False) as again:
            try:
                await again.hello()
            except Refused as refused:
                return refused.code
        return None


# --- bytes that are no messages --------------------------------------------------------------------------------------
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
