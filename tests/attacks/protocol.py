"""Attackers whose results break a rule that the learner checks before anything else. Each gets its code."""

from __future__ import annotations

import math
import secrets

import msgpack

from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.rollout import Segment
from tests.attacks.attack import WireAttack, lease_for, refusal
from tests.attacks.place import Lab
from tests.support.attacker import Attacker, result_of, sample_of


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
        while len(lease.samples) < 2:  # one that tops up a group
            await one.give_back([lease])
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
