"""Attackers that hand in completions other than those that their leases order, each dishonest in one thing.

Bounds are audited tokens, from the design of trust where it gives a length, and otherwise that of the nearest attack
that it names. An attack that chooses within floating-point noise cannot be told from another kernel; such ones say so
and are measured for what they gain.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rollmesh_learner.training.settings import TrainingSettings
from tests.attacks.attack import SamplingAttack
from tests.attacks.engine import (
    Drawn,
    Order,
    reseeded,
)
from tests.attacks.place import Lab

DELTA = TrainingSettings().delta
EDITED = 940
"""Audited tokens, where a few in a hundred are wrong."""
FIRST_AUDITED = 320
"""Tokens of the ten rollouts of a new node, all of which are audited: for what shows in nearly every token."""


# --- another distribution --------------------------------------------------------------------------------------------
class Warped(SamplingAttack):
    def warp(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        return await lab.forge.draw(replace(order, warp=self.warp))


class Tempered(Warped):
    temperature: ClassVar[float]

    def warp(self, logits: Tensor) -> Tensor:
        return logits / self.temperature


class Colder(Tempered):
    name = "temperature 0.7"
    temperature = 0.7
    bound_tokens = 100


class Cooler(Tempered):
    name = "temperature 0.9"
    temperature = 0.9
    bound_tokens = 360


class Hotter(Tempered):
    name = "temperature 1.2"
    temperature = 1.2
    bound_tokens = 360


class TopK(Warped):
    name = "top-k 50"
    bound_tokens = 360

    def warp(self, logits: Tensor) -> Tensor:
        least = logits.topk(min(50, len(logits) // 4)).values[-1]
        return logits.masked_fill(logits < least, -torch.inf)


class TopP(Warped):
    name = "top-p 0.95"
    bound_tokens = 360

    def warp(self, logits: Tensor) -> Tensor:
        values, order = logits.softmax(-1).sort(descending=True)
        outside = order[(values.cumsum(-1) - values) > 0.95]
        return logits.index_fill(0, outside, -torch.inf)


# --- other seeds -----------------------------------------------------------------------------------------------------
class SeedIgnored(SamplingAttack):
    name = "seed ignored"
    bound_tokens = 100

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        return await lab.forge.draw(reseeded(order, 1))


class BestOfN(SamplingAttack):
    """Four draws of each sample, of which the one with the highest reward is reported."""

    name = "best of 4"
    bound_tokens = 100

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        draws = [await lab.forge.draw(reseeded(order, shift)) for shift in range(4)]
        return [max(candidates, key=lab.reward) for candidates in zip(*draws, strict=True)]


class NearTies(SamplingAttack):
    """Where the second best token lies close to the best, the one that the reward likes better is taken."""

    within = 0.0
    """Nats."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = 0
        self.seen = 0
        self.gains: list[float] = []

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        def pick(_logits: Tensor, sums: Tensor) -> int:
            best = sums.topk(2)
            first, second = best.indices.tolist()
            self.seen += 1
            if float(best.values[0] - best.values[1]) < self.within and lab.letters_in(second) > lab.letters_in(first):
                self.chosen += 1
                return second
            return first

        drawn = await lab.forge.draw(replace(order, pick=pick))
        honest = await lab.forge.draw(order)
        self.gains += [lab.reward(a) - lab.reward(b) for a, b in zip(drawn, honest, strict=True)]
        return drawn

    async def conclude(self, lab: Lab) -> None:
        if not self.gains:
            return
        error = float(np.std(self.gains)) / len(self.gains) ** 0.5
        share = self.chosen / self.seen
        self.outcome.note = (
            f"chose {share:.1%} of tokens; reward {np.mean(self.gains):+.3f} (standard error {error:.3f}) "
            f"against honest work on the same leases"
        )
        self.outcome.no_effect = share <= 0.03


class NoiseTies(NearTies):
    """As close as two honest kernels come: nobody can tell, and little is to be had."""

    name = "choice among ties within 0.05 nats"
    expects = frozenset()
    within = 0.05


class WideTies(NearTies):
    """Just below the margin from which on tokens are counted."""

    name = "choice among ties within 0.45 nats"
    bound_tokens = 360
    within = 0.45


# --- altered completions ---------------------------------------------------------------------------------------------
class Edited(SamplingAttack):
    share = 0.0

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        random = Random(len(self.peers) + self.outcome.tokens)
        shifted = {
            (sample.seed, position)
            for sample in order.samples
            for position in range(order.max_new_tokens)
            if random.random() < self.share
        }

        def reseed(seed: int, position: int) -> int:
            return (seed + 1) % (1 << 64) if (seed, position) in shifted else seed

        return await lab.forge.draw(replace(order, reseed=reseed))


class Edited2(Edited):
    name = "2 % of tokens drawn again"
    share = 0.02
    bound_tokens = 2_350


class Edited5(Edited):
    name = "5 % of tokens drawn again"
    share = 0.05
    bound_tokens = EDITED


class EarlyEnd(SamplingAttack):
    """Cut after a few tokens, to be done sooner."""

    name = "early end of sequence"
    bound_tokens = 100

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        drawn = await lab.forge.draw(replace(order, max_new_tokens=min(5, order.max_new_tokens)))
        end = np.uint32(min(lab.stop))
        cut = []
        for one in drawn:
            if int(one.tokens[-1]) in lab.stop:
                cut.append(one)
                continue
            tokens = one.tokens.copy()
            tokens[-1] = end
            cut.append(replace(one, tokens=tokens))
        return cut


class Padded(Warped):
    """The end of a sequence is never drawn, so that every answer is as long as it may be.

    Only answers that would have ended earlier differ, by a token here and there: 4 in 544 lay above half a nat. So it
    is as hard to see as edited tokens, not as a wrong distribution, and has their bound.
    """

    name = "padding to the length limit"
    bound_tokens = EDITED

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        ends = torch.tensor(sorted(lab.stop))
        return await lab.forge.draw(replace(order, warp=lambda logits: logits.index_fill(0, ends, -torch.inf)))


class OtherPrompt(SamplingAttack):
    name = "prompt replaced"
    bound_tokens = 100

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        return await lab.forge.draw(replace(order, prompt=order.prompt[::-1].copy()))


class TrimmedPrompt(SamplingAttack):
    name = "prompt trimmed to its last half"
    bound_tokens = FIRST_AUDITED

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        return await lab.forge.draw(replace(order, prompt=order.prompt[len(order.prompt) // 2 :].copy()))


class Claimed(SamplingAttack):
    """True tokens with false log-probabilities, which would make them count more or less in the objective."""

    expects = frozenset()
    shift = 0.0

    async def work(self, order: Order, lab: Lab) -> list[Drawn]:
        drawn = await lab.forge.draw(order)
        return [replace(one, logprobs=np.minimum(one.logprobs + np.float32(self.shift), 0)) for one in drawn]

    async def conclude(self, lab: Lab) -> None:
        """Of what was trained on, the learner knew the true log-probabilities, or took the claims within delta."""
        (peer,) = self.peers
        rows = lab.rows(
            "SELECT exact_logprobs IS NOT NULL FROM rollouts WHERE node = ? AND state IN ('assigned', 'consumed')", peer
        )
        known = sum(exact for (exact,) in rows)
        self.outcome.note = (
            f"{known} of {len(rows)} trained rollouts with the learner's own log-probabilities, "
            f"the claims of the others cut to within {DELTA:g} nats of them"
        )
        self.outcome.no_effect = bool(rows) and known >= 0.9 * len(rows)


class Inflated(Claimed):
    name = "log-probabilities inflated by 1 nat"
    shift = 1.0


class Deflated(Claimed):
    name = "log-probabilities deflated by 1 nat"
    shift = -1.0
