"""Nodes as the learner knows them: their speed by what was accepted, their allowance by their speed, and places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.members.nodes import REST_FIRST_S, REST_MOST_S, Node, Nodes
from rollmesh_learner.members.standing import Record, StandingRules
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.messages import Hello, LeaseRequest

RULES = StandingRules(new_rollouts=10, probation_rollouts=50, rate_new=1.0, rate_probation=0.5, rate_steady=0.03)
HELLO = Hello(majors=(1,), software="", name="", role="worker", engine=None, addresses=(), invite=None)
GROUP = 8
OUT = Record(quarantined_for="result.sampling: a token lies 9 below")


def make_node() -> Node:
    return Node("peer-of-a-node", HELLO, Record(), last_seen=0.0)


def make_nodes(known: dict[str, Record] | None = None, *, most: int = 2) -> Nodes:
    return Nodes(known or {}, max_nodes=most, rules=RULES)


def allowance(node: Node, *, duration_s: float = 60.0, now: float = 1000.0) -> int:
    return node.allowance(duration_s=duration_s, samples_per_group=GROUP, now=now)


# --- speed -----------------------------------------------------------------------------------------------------------
def test_a_node_that_has_delivered_nothing_gets_one_group_and_the_longest_time() -> None:
    node = make_node()
    assert allowance(node) == GROUP
    assert node.lease_duration(tokens=10**9, least_s=30, most_s=600) == 600


def test_what_a_node_claims_of_its_speed_buys_nothing() -> None:
    node = make_node()
    node.heard(LeaseRequest(groups=16, version_held=1, root_held=None, tokens_per_s=1e9, waiting_for=""), now=1.0)
    assert (node.tokens_per_s, allowance(node)) == (0.0, GROUP)


def test_the_allowance_is_twice_what_is_delivered_within_a_lease() -> None:
    node = make_node()
    for number in range(20):
        node.delivered(samples=8, tokens=800, issued_at=4.0 * number, now=4.0 * number + 4)
    assert node.samples_per_s == pytest.approx(2.0)
    assert node.tokens_per_s == pytest.approx(200.0)
    assert allowance(node, duration_s=60) == 240
    assert node.lease_duration(tokens=10_000, least_s=30, most_s=600) == pytest.approx(200)
    assert node.lease_duration(tokens=100, least_s=30, most_s=600) == 30
    assert node.lease_duration(tokens=10**7, least_s=30, most_s=600) == 600


def test_results_of_one_batch_that_come_at_once_are_one_measurement() -> None:
    """An engine that works on four leases side by side for 40 s delivers them within milliseconds."""
    node = make_node()
    for batch in range(3):
        for place in range(4):
            node.delivered(samples=8, tokens=800, issued_at=40.0 * batch, now=40.0 * (batch + 1) + place / 1000)
    assert node.tokens_per_s == pytest.approx(80, rel=0.01)
    assert node.lease_duration(tokens=3200, least_s=30, most_s=600) == pytest.approx(160, rel=0.01)


def test_a_result_within_no_time_is_no_infinite_speed() -> None:
    node = make_node()
    node.delivered(samples=8, tokens=800, issued_at=5.0, now=5.0)
    assert node.samples_per_s == 8.0
    assert allowance(node, duration_s=10) == 160


def test_speed_follows_a_node_that_becomes_slow() -> None:
    node = make_node()
    now = 0.0
    for seconds in [1.0] * 200 + [20.0] * 30:
        node.delivered(samples=8, tokens=800, issued_at=now, now=now + seconds)
        now += seconds
    assert node.tokens_per_s == pytest.approx(40, rel=0.15)


def test_waiting_for_work_does_not_count_as_slowness() -> None:
    node = make_node()
    for start in (0.0, 1000.0, 5000.0):
        node.delivered(samples=8, tokens=800, issued_at=start, now=start + 10)
    assert node.tokens_per_s == pytest.approx(80)


@given(
    st.lists(
        st.tuples(st.integers(1, 256), st.integers(1, 100_000), st.floats(-100, 1e4), st.floats(0, 1e4), st.booleans()),
        max_size=40,
    )
)
def test_measures_stay_finite_and_positive(history: list[tuple[int, int, float, float, bool]]) -> None:
    node, now = make_node(), 0.0
    for samples, tokens, issued_at, seconds, fails in history:
        now += seconds
        if fails:
            node.failed_to_return(now=now)
        else:
            node.delivered(samples=samples, tokens=tokens, issued_at=issued_at, now=now)
        assert 0 <= node.samples_per_s <= node.tokens_per_s * 256
        assert allowance(node, now=now + REST_MOST_S + 1) >= GROUP
        assert 30 <= node.lease_duration(tokens=1000, least_s=30, most_s=600) <= 600


# --- leases that run out ---------------------------------------------------------------------------------------------
def test_leases_that_run_out_shrink_the_allowance_and_then_it_rests() -> None:
    node = make_node()
    for number in range(10):
        node.delivered(samples=8, tokens=800, issued_at=4.0 * number, now=4.0 * number + 4)
    before = allowance(node)
    node.failed_to_return(now=100.0)
    assert allowance(node, now=100.0) == before // 2
    node.failed_to_return(now=200.0)
    assert allowance(node, now=200.0 + REST_FIRST_S - 1) == 0
    assert allowance(node, now=200.0 + REST_FIRST_S) == before // 4
    node.failed_to_return(now=300.0)
    assert allowance(node, now=300.0 + 2 * REST_FIRST_S - 1) == 0
    node.delivered(samples=8, tokens=800, issued_at=360.0, now=364.0)
    assert allowance(node, now=364.0) >= GROUP, "a result that is accepted ends it"


def test_leases_that_run_out_together_count_once() -> None:
    node = make_node()
    for _ in range(4):
        node.failed_to_return(now=100.0)
    assert node.failures == 1
    assert allowance(node, now=100.0) == GROUP


def test_a_rest_has_an_end() -> None:
    node = make_node()
    for number in range(200):
        node.failed_to_return(now=float(number))
    assert allowance(node, now=199 + REST_MOST_S - 1) == 0
    assert allowance(node, now=199 + REST_MOST_S) == GROUP


# --- places ----------------------------------------------------------------------------------------------------------
def code_of(nodes: Nodes, peer: str, *, now: float = 0.0) -> str:
    with pytest.raises(Refused) as refused:
        nodes.admit(peer, HELLO, now=now)
    return refused.value.code


def test_a_full_run_takes_nobody_but_who_is_in_already() -> None:
    nodes = make_nodes(most=2)
    nodes.admit("a", HELLO, now=0.0)
    nodes.admit("b", HELLO, now=0.0)
    assert code_of(nodes, "c") == "run.full"
    nodes.admit("a", HELLO, now=1.0)
    assert code_of(nodes, "c", now=1.0) == "run.full"


def test_a_place_is_free_when_somebody_fell_silent_and_the_record_stays() -> None:
    nodes = make_nodes(most=2)
    nodes.admit("a", HELLO, now=0.0)
    nodes.set_record("a", Record(accepted=7))
    nodes.admit("b", HELLO, now=limits.DEAD_AFTER_S - 1)
    nodes.admit("c", HELLO, now=limits.DEAD_AFTER_S)
    assert [node.peer for node in nodes.all()] == ["b", "c"]
    assert not nodes.is_admitted("a")
    assert nodes.is_known("a")
    assert nodes.record_of("a") == Record(accepted=7)
    with pytest.raises(Refused) as refused:
        nodes.admitted("a")
    assert refused.value.code == "node.not_admitted"


def test_quarantine_shuts_every_door_also_after_a_restart() -> None:
    nodes = make_nodes({"bad": OUT, "good": Record(accepted=3)})
    assert nodes.quarantined() == ["bad"]
    assert code_of(nodes, "bad") == "node.quarantined"
    node = nodes.admit("good", HELLO, now=0.0)
    assert node.record.accepted == 3
    nodes.set_record("good", OUT)
    assert not nodes.is_admitted("good")
    assert nodes.active(0.0) == []
    with pytest.raises(Refused) as refused:
        nodes.admitted("good")
    assert refused.value.code == "node.quarantined"
    assert "a token lies 9 below" in refused.value.detail
    assert code_of(nodes, "good") == "node.quarantined"


def test_the_quarantined_give_their_place_up_in_time() -> None:
    nodes = make_nodes(most=1)
    nodes.admit("bad", HELLO, now=0.0)
    nodes.set_record("bad", OUT)
    nodes.admit("good", HELLO, now=limits.DEAD_AFTER_S)
    assert code_of(nodes, "bad", now=limits.DEAD_AFTER_S) == "node.quarantined"


def test_strangers_have_an_empty_record() -> None:
    nodes = make_nodes()
    assert nodes.record_of("nobody") == Record()
    assert nodes.standing_of("nobody").state == "new"
    assert not nodes.is_known("nobody")
    assert nodes.get("nobody") is None


def test_only_workers_that_were_heard_of_are_active() -> None:
    nodes = make_nodes(most=9)
    nodes.admit("worker", HELLO, now=10.0)
    nodes.admit("seed", HELLO.model_copy(update={"role": "seed"}), now=10.0)
    nodes.admit("gone", HELLO, now=0.0)
    assert [node.peer for node in nodes.active(limits.DEAD_AFTER_S)] == ["worker"]
    assert [node.peer for node in nodes.silent(limits.DEAD_AFTER_S)] == ["gone"]


def test_a_node_without_a_name_is_called_by_its_id() -> None:
    nodes = make_nodes()
    assert nodes.admit("12D3KooWabcdefgh", HELLO, now=0.0).name == "abcdefgh"
    assert nodes.admit("b", HELLO.model_copy(update={"name": "north"}), now=0.0).name == "north"


def test_whoever_delivered_comes_before_members_and_these_before_strangers() -> None:
    nodes = make_nodes()
    assert nodes.rank("a") == 0
    nodes.admit("a", HELLO, now=0.0)
    assert nodes.rank("a") == 1
    nodes.set_record("a", Record(accepted=3))
    assert nodes.rank("a") == 2
    nodes.set_record("a", Record(accepted=3, quarantined_for="result.sampling"))
    assert nodes.rank("a") == 0
