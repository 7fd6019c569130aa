"""The arrays of `make bench-trust` judge a life as the audit does, rollout by rollout."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh_learner.audit.derive import Derived
from rollmesh_protocol.verdicts.drift import DriftState, DriftTest, advance
from rollmesh_protocol.verdicts.margins import Thresholds, count_margins, judge_rollout, judge_window, keep_recent
from tests.bench.trust_cells import Cases
from tests.bench.trust_lives import score, walk

DERIVED = Derived(
    thresholds=Thresholds(low_margin=0.3, high_margin=0.5, any_margin=1.2, high_in_one=3, window_tokens=60),
    drift=DriftTest(clip=0.3, reference=0.02, exponent=3.0, alarm=6.0),
    delta=0.4,
)
LENGTH = 120


def audited(life: list[np.ndarray]) -> dict[str, int]:
    """Where each rule fires first, by the audit's own functions."""
    limits, test = DERIVED.thresholds, DERIVED.drift
    at = dict.fromkeys(("rollout", "window_hard", "window", "drift", "drift_twice"), LENGTH)
    recent: list[tuple[int, int, int]] = []
    state = DriftState()

    def fire(rule: str, place: int) -> None:
        at[rule] = min(at[rule], place)

    for place, margins in enumerate(life):
        figures = count_margins(margins, limits)
        if judge_rollout(figures, limits)[0] == "hard":
            fire("rollout", place)
        recent.append((figures.tokens, figures.over_low, figures.over_high))
        keep_recent(recent, limits)
        verdict, _ = judge_window(recent, limits)
        if verdict == "hard":
            fire("window_hard", place)
        if verdict != "pass":
            fire("window", place)
        state, is_alarm = advance(state, margins, test)
        if is_alarm:
            fire("drift" if state.alarms == 1 else "drift_twice", place)
    return at


@pytest.mark.parametrize("scale", [0.05, 0.1, 0.15, 0.3])
def test_walk_and_audit_agree(scale: float) -> None:
    random = np.random.default_rng(7)
    margins = [
        (random.exponential(scale, n) * (random.random(n) < 0.1)).astype(np.float32)
        for n in random.integers(1, 17, 300)
    ]
    cases = Cases(margins=margins, gaps=margins, nats=1.0, samples=1)
    lives = random.integers(0, len(margins), (30, LENGTH))
    found = walk(score(cases, DERIVED), lives, DERIVED)
    for number, life in enumerate(lives):
        expected = audited([margins[rollout] for rollout in life])
        assert {rule: int(found[rule][number]) for rule in expected} == expected
