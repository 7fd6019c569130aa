"""Attackers that generate with other weights than those that their leases name.

What old weights are worth is what the weights have moved since: within the noise between two kernels they cannot be
told from new ones and do no harm, so both ends are measured.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import trio

from tests.attacks.attack import SamplingAttack
from tests.attacks.engine import Drawn, Order, Weights, int4_groups, int8_rows, without_layers
from tests.attacks.place import Lab, account_of
from tests.attacks.sampling import FIRST_AUDITED


class WrongModel(SamplingAttack):
    name = "wrong model (2 of 30 layers dropped)"
    bound_tokens = FIRST_AUDITED

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        change = without_layers(*lab.middle_layers(2))
        return await lab.forge.draw(replace(order, weights=replace(order.weights, change=change)))


class Int8(SamplingAttack):
    name = "int8 weights, one scale a row"
    bound_tokens = 10_000

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        return await lab.forge.draw(replace(order, weights=replace(order.weights, change=int8_rows)))


class Int4(SamplingAttack):
    name = "int4 weights, groups of 32"
    bound_tokens = 1_000

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        return await lab.forge.draw(replace(order, weights=replace(order.weights, change=int4_groups)))


class Draft(SamplingAttack):
    """A smaller model writes, and the right one only scores: the log-probabilities are true."""

    name = "small draft, scored by the right model"
    bound_tokens = FIRST_AUDITED

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        change = without_layers(*lab.middle_layers(8))
        drawn = await lab.forge.draw(replace(order, weights=replace(order.weights, change=change)))
        scored = await lab.forge.recompute(order.weights, order, drawn)
        return [replace(one, logprobs=right.logprobs) for one, right in zip(drawn, scored, strict=True)]


class Relabelled(SamplingAttack):
    """Old weights under the newest root. What they are worth is what the weights have moved since."""

    def oldest(self, lab: Lab) -> bytes:
        raise NotImplementedError

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        old = Weights(root=self.oldest(lab))
        drawn = await lab.forge.draw(replace(order, weights=old))
        if not self.outcome.note:
            exact = await lab.forge.recompute(order.weights, order, drawn)
            gaps = np.concatenate([np.abs(a.logprobs - b.logprobs) for a, b in zip(drawn, exact, strict=True)])
            self.outcome.note = (
                f"drift at the start: median {np.median(gaps):.3f}, p90 {np.quantile(gaps, 0.9):.3f} nats"
            )
        return drawn


class BaseAsNewest(Relabelled):
    name = "base model, relabelled as the newest"
    bound_tokens = 1_000

    async def prepare(self, lab: Lab) -> None:
        while len(lab.studio.images) < lab.versions_of_drift and trio.current_time() < lab.last_call:
            await trio.sleep(1)

    def oldest(self, lab: Lab) -> bytes:
        return lab.studio.oldest


class OneVersionOld(Relabelled):
    name = "weights one version old, relabelled"
    expects = frozenset()

    async def prepare(self, lab: Lab) -> None:
        while len(lab.studio.images) < 2 and trio.current_time() < lab.last_call:
            await trio.sleep(1)

    def oldest(self, lab: Lab) -> bytes:
        roots = list(lab.studio.images)
        return roots[-2] if len(roots) > 1 else roots[-1]

    async def conclude(self, lab: Lab) -> None:
        found = account_of(lab, self.peers)
        if found.audited_tokens:
            over = found.over_low / found.audited_tokens
            self.outcome.note += f"; {over:.2%} of its audited tokens over 0.5 nats"
            self.outcome.no_effect = over <= 0.01
