"""Tripwires: honest runs, recorded and simulated, trip nothing; what goes wrong does, and says what and where."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.config import Tripwires
from rollmesh_learner.training.tripwires import RECENT, Bounds, Line, Trip, judge, where_to

RECORDED: dict[str, list[dict[str, float]]] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "honest_steps.json").read_text()
)
BOUNDS = Bounds()


def steady(count: int, **figures: float) -> list[Line]:
    """So many quiet steps, with a little noise."""
    noise = Random(count)
    return [line(step, noise=noise, **figures) for step in range(count)]


def line(step: int, *, noise: Random | None = None, **figures: float) -> dict[str, object]:
    values = {"reward": 0.5, "tokens_mean": 100.0, "gradient_norm": 1.0, "kl_update": 0.001, "groups": 8.0} | figures
    shake = noise.uniform if noise else lambda _low, _high: 1.0
    return {"step": step, "age_max": 2, **{name: value * shake(0.95, 1.05) for name, value in values.items()}}


def run(lines: list[Line], bounds: Bounds = BOUNDS) -> list[Trip]:
    """Every trip of a run that goes on whatever happens; a step that trips does not become history."""
    good: list[Line] = []
    trips = []
    for each in lines:
        trip = judge(each, history=good, bounds=bounds)
        if trip is None:
            good.append(each)
        else:
            trips.append(trip)
    return trips


def test_the_config_has_the_same_defaults() -> None:
    assert Tripwires().to(Bounds) == BOUNDS


# --- honest runs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_trip_nothing(name: str) -> None:
    assert len(RECORDED[name]) == 40
    assert run([*RECORDED[name]]) == []


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_keep_their_distance(name: str) -> None:
    """The same runs, with every bound that compares two thirds as wide, and floors as well."""
    tight = Bounds(
        spike_factor=6.7, kl_floor=0.13, gradient_floor=6.7, reward_fall=0.17, reward_rise=0.34, reward_factor=2.0,
        length_share=0.33, length_factor=3.3,
    )  # fmt: skip
    assert run([*RECORDED[name]], tight) == []
    twice = [each | {"kl_update": each["kl_behaviour"]} for each in RECORDED[name]]  # of up to two steps, and noise
    assert run([*twice], tight) == []


@pytest.mark.parametrize("prompts", [2, 8, 64])
@pytest.mark.parametrize(("start", "end"), [(0.02, 0.95), (0.4, 0.6), (0.9, 0.99)])
def test_simulated_learning_trips_nothing(prompts: int, start: float, end: float) -> None:
    """Prompts of different difficulty, eight answers each; the mean rises from start to end within 30 steps."""
    for seed in range(320 // prompts if prompts > 8 else 40):
        random = Random(seed)
        lines = []
        for step in range(120):
            level = start + (end - start) * min(1.0, step / 30)
            right = 0
            for _ in range(prompts):
                ease = random.betavariate(2 * level, 2 * (1 - level))
                right += sum(random.random() < ease for _ in range(8))
            lines.append({"step": step, "reward": right / (8 * prompts), "groups": float(prompts), "age_max": 2})
        assert run(lines) == [], f"seed {seed}"


@given(start=st.floats(0, 0.3), slope=st.floats(0, 0.08), growth=st.floats(0.93, 1.15), seed=st.integers(0, 1000))
def test_steady_learning_and_steady_growth_trip_nothing(start: float, slope: float, growth: float, seed: int) -> None:
    random = Random(seed)
    lines = [
        line(step, noise=random, reward=min(0.95, start + slope * step), tokens_mean=max(2.0, 50 * growth**step))
        for step in range(60)
    ]
    assert run(lines) == []


@given(factor=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_gradients_of_any_size_trip_nothing_while_they_stay_as_they_are(factor: float, seed: int) -> None:
    random = Random(seed)
    lines = [{"step": step, "gradient_norm": min(factor * random.lognormvariate(0, 0.5), 999.0)} for step in range(100)]
    assert run(lines) == []


# --- what goes wrong -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(
    ("wire", "change"),
    [
        ("finite", {"loss": math.nan}),
        ("finite", {"updates_refused": 1.0}),
        ("finite", {"figures_not_finite": 2.0}),
        ("kl", {"kl_update": 3.0}),
        ("gradient norm", {"gradient_norm": 60.0}),
        ("clipped", {"clip_fraction": 0.7}),
        ("length", {"tokens_mean": 1.0}),
        ("length", {"tokens_mean": 40.0}),
    ],
)
def test_a_recorded_run_that_goes_wrong_at_its_end_trips(name: str, wire: str, change: dict[str, float]) -> None:
    *before, last = RECORDED[name]
    (trip,) = run([*before, last | change])
    assert (trip.step, trip.wire) == (39, wire)
    assert trip.sentence


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_whose_reward_collapses_trips_at_the_second_step(name: str) -> None:
    *before, last_but_one, last = RECORDED[name]
    (trip,) = run([*before, last_but_one | {"reward": 0.0}, last | {"reward": 0.0}])
    assert (trip.step, trip.wire, trip.last_good) == (39, "reward", 35)
    assert trip.sentence.startswith("mean reward of 2 steps 0 is below 0.")


@pytest.mark.parametrize(
    ("wire", "value", "change", "bound"),
    [
        ("kl", 0.3, {"kl_update": 0.3}, 0.2),
        ("gradient norm", 11.0, {"gradient_norm": 11.0}, 10.0),
        ("reward", 0.2, {"reward": 0.2, "groups": 64.0}, 0.25),
        ("length", 30.0, {"tokens_mean": 30.0}, 45.0),
        ("length", 170.0, {"tokens_mean": 170.0}, 155.0),
    ],
)
def test_the_trip_says_value_and_bound(wire: str, value: float, change: dict[str, float], bound: float) -> None:
    trip = judge(line(20, **change), history=steady(20), bounds=BOUNDS)
    assert trip is not None
    assert (trip.wire, trip.value) == (wire, value)
    assert trip.bound == pytest.approx(bound, rel=0.15)
    assert f"{value:.4g}" in trip.sentence
    assert f"{trip.bound:.4g}" in trip.sentence
    assert "median of the last 20 good steps" in trip.sentence


def test_a_reward_that_jumps_beyond_learning_trips() -> None:
    history = steady(20, reward=0.1)
    assert judge(line(20, reward=0.55), history=history, bounds=BOUNDS) is None
    trip = judge(line(20, reward=0.95, groups=16), history=history, bounds=BOUNDS)
    assert trip is not None
    assert trip.wire == "reward"
    assert "above" in trip.sentence


def test_a_collapse_that_comes_in_two_blows_trips_at_the_second() -> None:
    lines = [*steady(20, reward=0.8), line(20, reward=0.6, groups=64), line(21, reward=0.4, groups=64)]
    (trip,) = run(lines)
    assert trip.step == 21


def test_with_few_prompts_more_is_allowed() -> None:
    history = steady(20, groups=2.0)
    assert judge(line(20, reward=0.1, groups=2.0), history=history, bounds=BOUNDS) is None
    assert judge(line(20, reward=0.1, groups=64.0), history=history, bounds=BOUNDS) is not None


def test_before_there_is_a_history_only_absolute_bounds_act() -> None:
    few = steady(BOUNDS.min_steps - 1)
    wild = line(9, reward=0.0, tokens_mean=1.0, gradient_norm=900.0, kl_update=1.9)
    assert judge(wild, history=few, bounds=BOUNDS) is None
    for change in ({"gradient_norm": 1001.0}, {"kl_update": 2.1}, {"clip_fraction": 0.6}, {"loss": math.inf}):
        assert judge(line(0, **change), history=[], bounds=BOUNDS) is not None


def test_figures_that_a_step_does_not_have_are_not_judged() -> None:
    assert judge({"step": 20, "updated": False}, history=steady(20), bounds=BOUNDS) is None


def test_a_flat_history_without_any_spread_bears_small_changes() -> None:
    flat: list[Line] = [line(step, reward=0.0, tokens_mean=12.0) for step in range(20)]
    assert judge(line(20, reward=0.3, tokens_mean=9.0), history=flat, bounds=BOUNDS) is None


@given(st.lists(st.floats(0, 1), min_size=10, max_size=30), st.floats(0, 1))
def test_a_higher_reward_never_trips_where_a_lower_one_between_it_and_the_recent_ones_does_not(
    past: list[float], value: float
) -> None:
    """Good values form one interval that holds the whole recent past."""
    history: list[Line] = [{"step": step, "reward": reward, "groups": 8.0} for step, reward in enumerate(past)]

    def is_good(reward: float) -> bool:
        return judge({"step": 99, "reward": reward, "groups": 8.0}, history=history, bounds=BOUNDS) is None

    best = max(past[-RECENT:])
    assert is_good(best)
    if is_good(value):
        assert is_good((value + best) / 2)


# --- where to go back to ---------------------------------------------------------------------------------------------
def trip_at(step: int, *, last_good: int | None = None) -> Trip:
    return Trip(
        step=step, wire="reward", value=0, bound=0, sentence="", last_good=step if last_good is None else last_good
    )


def test_what_speaks_of_older_weights_suspects_them() -> None:
    reward = judge(line(30, reward=0.0, groups=64), history=steady(20), bounds=BOUNDS)
    gradient = judge(line(30, gradient_norm=50.0), history=steady(20), bounds=BOUNDS)
    assert reward is not None
    assert gradient is not None
    assert reward.last_good == 27, "rollouts up to two steps old: weights of step 28 made some of them"
    assert gradient.last_good == 30, "the update is bad, the weights before it are not"


@pytest.mark.parametrize(
    ("saved", "trip", "tried", "to"),
    [
        ([5, 10], trip_at(12), [], 10),
        ([5, 10], trip_at(12, last_good=9), [], 5),
        ([5, 10], trip_at(12), [10], 5),
        ([5, 10, 15], trip_at(16, last_good=13), [10], 10),
        ([10], trip_at(12), [10], 10),
        ([10], trip_at(11, last_good=8), [], 10),
        ([5], trip_at(6, last_good=3), [], 0),
        ([], trip_at(3), [], 0),
    ],
)
def test_the_way_back(saved: list[int], trip: Trip, tried: list[int], to: int) -> None:
    assert where_to(saved, trip=trip, tried=tried, checkpoint_every=5) == to
