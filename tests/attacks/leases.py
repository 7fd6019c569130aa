"""Attackers that deal falsely with leases: their own, twice or never, and those of others."""

from __future__ import annotations

import secrets
from contextlib import suppress

import numpy as np
import trio

from rollmesh_protocol import limits, streams
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.lease import Lease, LeasedSample
from rollmesh_protocol.messages import LeaseAnswer, LeaseRequest
from tests.attacks.attack import (
    ASK_AGAIN_S,
    WireAttack,
    any_refusal,
    hand_in,
    lease_for,
    open_stubborn,
    refusal,
    result_from,
)
from tests.attacks.engine import order_of
from tests.attacks.place import Lab
from tests.support.attacker import Attacker, open_attacker, result_of

PATIENCE_S = 240.0
NOISE = 2.0
"""How long leases stand depends on how fast others are just now."""


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
        async with open_stubborn(lab.join) as other:
            lease = await lease_for(other, lab)
            drawn = await lab.forge.draw(order_of(lease, stop=lab.stop))
            body = result_from(lease, drawn, lab).encode()
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
        async with open_stubborn(lab.join) as other:
            return await refusal(one, one.seal(result_of(await lease_for(other, lab)).encode()))


class UnknownLease(WireAttack):
    name = "lease that never was"
    expects = frozenset({"lease.unknown"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        made_up = lease.model_copy(update={"lease_id": secrets.token_bytes(16)})
        return await refusal(one, one.seal(result_of(made_up).encode()))


class Expired(WireAttack):
    """Held in silence until others have been given it and have filled it; then a result for it."""

    name = "expired lease"
    alive = False
    expects = frozenset({"lease.expired", "result.stale"})

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        with trio.move_on_after(PATIENCE_S):
            while not lab.rows(
                "SELECT 1 FROM rollouts WHERE group_id = ? AND sample = ? AND node != ?"
                " AND state IN ('ready', 'assigned', 'consumed', 'stale')",
                lease.group, lease.samples[0].index, one.peer,
            ):  # fmt: skip
                await trio.sleep(2)
        one.held.clear()
        return await refusal(one, one.seal(result_of(lease).encode()))


class Abandoning(WireAttack):
    """Takes leases and lets them run out: it is given none for a while, and its samples go to others."""

    name = "abandoning leases"
    alive = False

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


class Holding(WireAttack):
    """Takes a group, says every few seconds that it is alive, and does nothing: the next batch would wait for it."""

    name = "work held and not done"

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        lease = await lease_for(one, lab)
        started = trio.current_time()
        is_filled = False
        with trio.move_on_after(PATIENCE_S):
            while not is_filled:
                await trio.sleep(2)
                is_filled = all(is_filled_by_others(one, lab, lease.group, sample) for sample in lease.samples)
        held_s = trio.current_time() - started
        self.outcome.note = (
            f"others made its samples after {held_s:.0f} s of the {lease.duration_s:g} s that its lease stands"
        )
        self.outcome.no_effect = is_filled and held_s < lease.duration_s
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
        self.outcome.no_effect = slow <= NOISE * fast
        return None


class Withholding(WireAttack):
    """Makes honest samples and hands in only leases whose reward it likes; the others go back."""

    name = "withholding bad samples"

    async def strike(self, one: Attacker, lab: Lab) -> str | None:
        withheld: list[Lease] = []
        rewards: list[float] = []
        with trio.move_on_after(PATIENCE_S / 2):  # it rests when it gives work back late
            while len(rewards) < 8:
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
                filled = sum(is_filled_by_others(one, lab, group, sample) for group, sample in places)
        self.outcome.note = f"{filled} of {len(places)} withheld samples were made by others with the same seeds"
        self.outcome.no_effect = filled == len(places) if places else None
        return None


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


def is_filled_by_others(one: Attacker, lab: Lab, group: int, sample: LeasedSample) -> bool:
    """Whether another node made the sample that ``one`` was to make, with the same seed."""
    rows = lab.rows("SELECT node, seed FROM rollouts WHERE group_id = ? AND sample = ?", group, sample.index)
    return any(node != one.peer and seed == sample.seed.to_bytes(8, "little") for node, seed in rows)
