"""Tripwires (layer L8): is a step's account what an honest step looks like, or has training gone wrong? Pure.

A wire looks at one figure of a step. Some bounds are absolute and act from the first step on; the others are relative
to the last good steps, robustly, and act once there are enough of those:

    spikes (KL of the update, gradient norm)    x > max(floor, median + factor * max(spread, median))
    reward falls       mean of the last k <= 3  x < median - max(fall, factor * spread), and not by chance
    reward jumps                                x > best of the last 5 + max(rise, factor * spread), and not by chance
    length jumps                                x beyond the extremes of the last 5 by max(share, factor * spread)

with spread = 1.4826 * median |x - median|, which is the standard deviation of normal noise and hardly feels outliers.
Jumps are measured from the last few steps and not from the median, so learning, however steady, is none.

Not by chance: rewards lie in [0, 1], so the mean over n prompts that are drawn alike, with expectation m, is x or
further off with a probability of at most exp(-n d), d = x ln(x/m) + (1-x) ln((1-x)/(1-m)) (Chernoff and Hoeffding).
Answers to one prompt are no independent draws, so n counts prompts; m is what the history says, with one success and
one failure added to it. A wire needs n d > 12, which is a chance of 6e-6; small batches reach it over several steps.

Invariant: no figure here is a node's word. The divergence of a policy from what nodes claim (``kl_behaviour``) has no
wire, because one liar could then roll the run back as often as they like; neither has what the loss clamps of it.

It knows no files, no ledger and no way back: :mod:`rollmesh_learner.watch` acts on what is found here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

MAD_TO_DEVIATION: Final = 1.4826
"""Median absolute deviations in one standard deviation of a normal distribution."""
RELATIVE_SPREAD: Final = 1.0
"""A spike's spread is at least this share of the median: norms of sparse batches differ by a factor of some units."""
RECENT: Final = 5
"""Steps from whose extremes a jump is measured."""
POOLED: Final = 3
"""Steps over which a fall of the reward is looked for, at most."""
CHANCE_NATS: Final = 12.0
"""A reward that is off with a probability above exp(-12), by the bound above, is called chance."""
MANY_PROMPTS: Final = 8
"""Prompts in a batch from which on its mean length counts as it is; with fewer the share grows by sqrt(8 / prompts)."""

Line = Mapping[str, object]
"""The account of one step, as in metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Where the wires are. Units and reasons: the section ``[tripwires]`` of the learner's config."""

    window: int = 20
    min_steps: int = 10
    spike_factor: float = 10.0
    kl_floor: float = 0.2
    kl_most: float = 2.0
    gradient_floor: float = 10.0
    gradient_most: float = 1000.0
    clipped_most: float = 0.5
    reward_fall: float = 0.25
    reward_rise: float = 0.5
    reward_factor: float = 3.0
    length_share: float = 0.5
    length_factor: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Trip:
    """A step that must not count."""

    step: int
    wire: str
    value: float
    bound: float
    sentence: str
    last_good: int
    """Weights of this step and before are above suspicion."""


def judge(line: Line, *, history: Sequence[Line], bounds: Bounds) -> Trip | None:
    """The first wire that the step of ``line`` trips; None when all is well.

    ``history`` holds the good steps before it, oldest first; no more than the last ``bounds.window`` are looked at.
    A figure that a step does not have (no update, no gradient norm) is not judged.
    """
    wires = _Wires(line, list(history)[-bounds.window :], bounds)
    return (
        wires.finite()
        or wires.spike("kl", "kl_update", floor=bounds.kl_floor, most=bounds.kl_most)
        or wires.spike("gradient norm", "gradient_norm", floor=bounds.gradient_floor, most=bounds.gradient_most)
        or wires.clipped()
        or wires.reward()
        or wires.length()
    )


def where_to(saved: Collection[int], *, trip: Trip, tried: Collection[int] = (), checkpoint_every: int) -> int:
    """The step to go back to: the newest checkpoint above suspicion; 0 is the base model.

    ``saved`` are the steps of the checkpoints there are. If the run went back to the newest of them already (it is in
    ``tried``) and did not get any further, an older one is preferred. Where none is old enough the oldest is the best
    there is, unless the run is so young that none could be: then it begins again.
    """
    there = sorted(step for step in saved if step <= trip.step)
    good = [step for step in there if step <= trip.last_good]
    fresh = [step for step in good if step < there[-1] or step not in tried]
    if fresh or good:
        return fresh[-1] if fresh else good[0]
    return there[0] if there and trip.last_good >= checkpoint_every else 0


@dataclass(frozen=True)
class _Wires:
    line: Line
    history: Sequence[Line]
    bounds: Bounds

    @property
    def step(self) -> int:
        return int(_figure(self.line, "step") or 0)

    def finite(self) -> Trip | None:
        """Numbers that are none, in the account or, unseen in it, inside the trainer."""
        for name, value in self.line.items():
            if isinstance(value, float) and not math.isfinite(value):
                return self._trip("finite", value, 0.0, f"{name} is {value}")
        for name, what in (("updates_refused", "gradients"), ("figures_not_finite", "figures")):
            count = _figure(self.line, name) or 0.0
            if count > 0:
                return self._trip("finite", count, 0.0, f"{count:g} {what} are not finite")
        return None

    def spike(self, wire: str, name: str, *, floor: float, most: float) -> Trip | None:
        """A figure that is never negative and may be small for any reason."""
        value = _figure(self.line, name)
        if value is None:
            return None
        bound = most
        past = self._past(name)
        if past is not None:
            middle, spread = _robust(past)
            usual = middle + self.bounds.spike_factor * max(spread, RELATIVE_SPREAD * middle)
            bound = min(most, max(floor, usual))
        if value <= bound:
            return None
        return self._trip(wire, value, bound, f"{name} {value:.4g} is above {bound:.4g}{_beside(past)}")

    def clipped(self) -> Trip | None:
        """The share of tokens whose ratio was clipped; 0 where a batch makes one update."""
        value, bound = _figure(self.line, "clip_fraction"), self.bounds.clipped_most
        if value is None or value <= bound:
            return None
        return self._trip("clipped", value, bound, f"clip_fraction {value:.4g} is above {bound:.4g}")

    def reward(self) -> Trip | None:
        """The mean reward over all accepted rollouts: a collapse, or a jump that no learning makes."""
        value = _figure(self.line, "reward")
        return None if value is None else self._reward_falls(value) or self._reward_jumps(value)

    def _reward_falls(self, value: float) -> Trip | None:
        newest = [value]
        for count in range(1, POOLED + 1):
            before = self._past("reward", but=count - 1)
            if before is None:
                break
            mean = sum(newest) / count
            middle, spread = _robust(before)
            least = middle - max(self.bounds.reward_fall, self.bounds.reward_factor * spread)
            expected = self._smoothed(sum(before) / len(before), steps=len(before))
            if mean < least and self._is_no_chance(mean, expected, steps=count):
                name = "reward" if count == 1 else f"mean reward of {count} steps"
                return self._beyond("reward", name, mean, least, past=before, back=count - 1)
            newest.append(before[-1])
        return None

    def _reward_jumps(self, value: float) -> Trip | None:
        past = self._past("reward")
        if past is None:
            return None
        best = max(past[-RECENT:])
        most = best + max(self.bounds.reward_rise, self.bounds.reward_factor * _robust(past)[1])
        if value > most and self._is_no_chance(value, self._smoothed(best, steps=1), steps=1):
            return self._beyond("reward", "reward", value, most, past=past)
        return None

    def _smoothed(self, mean: float, *, steps: int) -> float:
        return (mean * steps * self._prompts + 1) / (steps * self._prompts + 2)

    def _is_no_chance(self, mean: float, expected: float, *, steps: int) -> bool:
        return steps * self._prompts * _relative_entropy(mean, expected) > CHANCE_NATS

    def length(self) -> Trip | None:
        """The mean completion length, in tokens: it may grow and shrink, but not at one blow."""
        value, past = _figure(self.line, "tokens_mean"), self._past("tokens_mean")
        if value is None or past is None:
            return None
        middle, spread = _robust(past)
        few = math.sqrt(MANY_PROMPTS / min(self._prompts, MANY_PROMPTS))
        slack = max(self.bounds.length_share * middle * few, self.bounds.length_factor * spread)
        least, most = min(past[-RECENT:]) - slack, max(past[-RECENT:]) + slack
        if least <= value <= most:
            return None
        return self._beyond("length", "tokens_mean", value, least if value < least else most, past=past)

    @property
    def _prompts(self) -> float:
        return _figure(self.line, "groups") or MANY_PROMPTS

    def _past(self, name: str, *, but: int = 0) -> list[float] | None:
        """A figure's values in the good steps that have it, but the last few; None while they are too few."""
        values = [value for line in self.history if (value := _figure(line, name)) is not None]
        values = values[: len(values) - but]
        return values if len(values) >= self.bounds.min_steps else None

    def _beyond(
        self, wire: str, name: str, value: float, bound: float, *, past: Sequence[float], back: int = 0
    ) -> Trip:
        """What rollouts tell of the last ``back`` steps and this one speaks of the weights that made the oldest."""
        side = "below" if value < bound else "above"
        oldest = self.step - back - int(_figure(self.line, "age_max") or 0)
        sentence = f"{name} {value:.4g} is {side} {bound:.4g}{_beside(past)}"
        return self._trip(wire, value, bound, sentence, last_good=max(0, oldest - 1))

    def _trip(self, wire: str, value: float, bound: float, sentence: str, *, last_good: int | None = None) -> Trip:
        return Trip(
            step=self.step,
            wire=wire,
            value=value,
            bound=bound,
            sentence=sentence,
            last_good=self.step if last_good is None else last_good,
        )


def _figure(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """Median and spread."""
    middle = median(values)
    return middle, MAD_TO_DEVIATION * median(abs(value - middle) for value in values)


def _relative_entropy(mean: float, expected: float) -> float:
    """Of two coins, in nats; ``expected`` is neither 0 nor 1."""
    parts = ((mean, expected), (1 - mean, 1 - expected))
    return sum(part * math.log(part / other) for part, other in parts if part > 0)


def _beside(past: Sequence[float] | None) -> str:
    return f" (median of the last {len(past)} good steps: {median(past):.4g})" if past else ""
