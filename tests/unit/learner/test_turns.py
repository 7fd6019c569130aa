"""Whose answers are scored next: simulated rounds of the sandbox, and what one round may hold."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.work import turns as module
from rollmesh_learner.work.groups import StoredRollout
from rollmesh_learner.work.turns import DEAR_S, MOST_ANSWERS, MOST_AT_ONCE, MOST_TOKENS, STRANGERS_SHARE, Turns

ROUND_S = 1.0
GROUP = 8


def rollout(node: str, group: int, sample: int = 0, *, num_tokens: int = 4) -> StoredRollout:
    return StoredRollout(
        lease_id=f"{node}-{group}".encode(), sample=sample, group_id=group, node=node, version=0, step=0,
        root=bytes(32), seed=1, tokens=bytes(4 * num_tokens), logprobs=b"", finish="stop", drawn=False,
    )  # fmt: skip


class Bench:
    """A book of waiting rollouts and a sandbox in which an answer of each node takes ``cost[node]`` seconds."""

    def __init__(self, cost: dict[str, float], *, known: set[str] | None = None) -> None:
        self.cost = cost
        self.known = set(cost) if known is None else known
        self.turns = Turns()
        self.waiting: list[StoredRollout] = []
        self.now = 0.0
        self.scored: list[tuple[float, StoredRollout]] = []
        self.spent: dict[str, float] = defaultdict(float)

    def hand_in(self, node: str, *groups: int, samples: int = GROUP) -> None:
        self.waiting += [rollout(node, group, sample) for group in groups for sample in range(samples)]
        self.waiting.sort(key=lambda one: (one.group_id, one.sample))

    def round(self) -> None:
        plan = self.turns.plan(iter(self.waiting), is_known=self.known.__contains__)
        assert bool(plan) == bool(self.waiting)
        until = self.now + ROUND_S
        for turn in plan:
            (node,) = {one.node for one in turn}
            assert len({one.group_id for one in turn}) == 1 and len(turn) <= MOST_ANSWERS
            seconds = self.cost[node] * len(turn)
            self.now += seconds
            self.spent[node] += seconds
            self.turns.took(node, answers=len(turn), seconds=seconds)
            for one in turn:
                self.waiting.remove(one)
                self.scored.append((self.now, one))
            if self.now >= until:
                return

    def run(self, until: float = float("inf")) -> None:
        while self.waiting and self.now < until:
            self.round()

    def done_at(self, node: str) -> float:
        return max(at for at, one in self.scored if one.node == node)


def test_answers_that_run_into_their_limits_hold_up_their_own_node() -> None:
    """In the order of the book the honest node's last answer would come after 400 s."""
    bench = Bench({"slow": 2.0, "honest": 0.01})
    bench.hand_in("slow", *range(25))
    bench.hand_in("honest", *range(25, 50))
    bench.run()
    assert bench.done_at("honest") < 12, "turn about, and never more than one dear answer before it"
    assert bench.done_at("slow") > 400


def test_a_crowd_of_strangers_leaves_most_of_the_time_to_those_with_a_record() -> None:
    strangers = {f"stranger-{number}": 2.0 for number in range(30)}
    bench = Bench({**strangers, "honest": 0.05}, known={"honest"})
    for node in strangers:
        bench.hand_in(node, *range(3))
    bench.hand_in("honest", *range(100, 180))
    bench.run()
    took_s = bench.done_at("honest")
    of_strangers_s = took_s - bench.spent["honest"]
    assert 0 < of_strangers_s <= STRANGERS_SHARE * took_s + bench.cost["stranger-0"]


def test_an_honest_stranger_comes_between_those_that_are_dear() -> None:
    bench = Bench({"slow": 2.0, "honest": 0.01}, known=set())
    bench.hand_in("slow", *range(20))
    bench.run(until=20)
    bench.hand_in("honest", 50)
    bench.run(until=30)
    assert bench.done_at("honest") < 24


def test_who_was_away_has_saved_nothing_up() -> None:
    bench = Bench({"one": 0.4, "other": 0.4})
    bench.hand_in("one", *range(30))
    bench.run(until=60)
    bench.hand_in("other", *range(30))
    before = bench.spent["one"]
    bench.run(until=bench.now + 20)
    assert abs((bench.spent["one"] - before) - bench.spent["other"]) <= MOST_ANSWERS * 0.4


def test_turns_grow_while_they_are_cheap_and_shrink_at_once() -> None:
    bench = Bench({"node": 0.01})
    bench.hand_in("node", 0, samples=400)
    sizes = []
    for _ in range(3):
        sizes.append({len(turn) for turn in bench.turns.plan(bench.waiting, is_known=bench.known.__contains__)})
        bench.round()
    assert sizes == [{1}, {MOST_ANSWERS}, {MOST_ANSWERS}]
    bench.turns.took("node", answers=16, seconds=16 * DEAR_S + 1)
    assert {len(turn) for turn in bench.turns.plan(bench.waiting, is_known=bench.known.__contains__)} == {1}


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5), st.integers(0, 3)), max_size=60, unique=True),
    st.fixed_dictionaries({name: st.sampled_from([0.01, 0.3, 2.0]) for name in "abcd"}),
    st.sets(st.sampled_from("abcd")),
)
def test_everything_is_scored_once_and_each_node_in_group_order(
    handed_in: list[tuple[str, int, int]], cost: dict[str, float], known: set[str]
) -> None:
    bench = Bench(cost, known=known)
    bench.waiting = [rollout(node, group, sample) for node, group, sample in sorted(handed_in, key=lambda at: at[1:])]
    bench.run()
    assert len(bench.scored) == len(handed_in)
    for node in "abcd":
        groups = [one.group_id for _, one in bench.scored if one.node == node]
        assert groups == sorted(groups)


def plan_of(pending: list[StoredRollout]) -> list[int]:
    turns = Turns()
    for node in {one.node for one in pending}:
        for _ in range(5):
            turns.took(node, answers=1, seconds=0.0)
    return [len(turn) for turn in turns.plan(pending, is_known=lambda _node: True)]


def test_rounds_hold_what_one_frame_can_carry() -> None:
    assert plan_of([]) == []
    crowd = [rollout(f"n{number % 50:02}", number) for number in range(1000)]
    assert sum(plan_of(crowd)) == 4 * 50
    crowd = [rollout(f"n{number % 50:02}", 0, number) for number in range(1000)]
    assert sum(plan_of(crowd)) == MOST_AT_ONCE
    long = [rollout("n", 0, number, num_tokens=32_768) for number in range(40)]
    assert sum(plan_of(long)) == MOST_TOKENS // 32_768
    huge = [rollout("n", 0, number, num_tokens=MOST_TOKENS + 1) for number in range(2)]
    assert plan_of(huge) == [1]


def test_the_nodes_that_are_remembered_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT_NODES", 4)
    turns = Turns()
    for number in range(100):
        turns.took(f"n{number}", answers=1, seconds=1.0)
    assert len(turns._uses) == 4
