"""The summary has what was promised, and the verdicts follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollmesh_learner.demo.account import findings, read_account, summary_of
from rollmesh_learner.records.summary import NodeAccount, RunSummary, TrustAccount, write_summary
from tests.unit.status.samples import PEERS, node_status

PROMISED = {
    "steps", "reward_first5", "reward_last10", "wall_s", "nodes", "versions_published", "patch_bytes_mean",
    "full_bytes", "chunks_from_peers", "audits_done", "audits_failed", "staleness_max", "bubble_fraction", "checkpoint",
}  # fmt: skip
NODES = {
    "node-a": node_status(peer=PEERS[1], chunks_from_peers=20, chunks_from_learner=5),
    "node-b": node_status(peer=PEERS[2], chunks_from_peers=3, chunks_from_learner=9),
}
GOOD = RunSummary(
    run="r-1", steps=40, reward_first5=0.03, reward_last10=0.78,
    nodes=(
        NodeAccount(peer=PEERS[1], name="node-a", accepted=1300, rejected=0, tokens=14_000),
        NodeAccount(peer=PEERS[2], name="node-b", accepted=1260, rejected=0, tokens=13_000),
    ),
    versions_published=41, patch_bytes_mean=3.4e6, full_bytes=269_030_016, audits_done=400, audits_failed=0,
    trust=TrustAccount(
        audited_tokens=10, work_tokens=100, audited_share=0.1, audited_share_steady=0.032, consumed_bad={}, lengths={}
    ),
    staleness_max=2, bubble_fraction=0.1, rollbacks=(), rollouts={"consumed": 2560},
    checkpoint="/somewhere/step-00000040",
)  # fmt: skip


COST = "of nodes in full standing they recompute 5 % of the tokens at most"


def broken(account: RunSummary, *, nodes=NODES, wall_s: float = 500.0) -> dict[str, bool]:
    """The promises that are not kept, and whether they are hard."""
    return {f.promise: f.is_hard for f in findings(account, nodes=nodes, steps=40, wall_s=wall_s) if not f.is_kept}


def test_the_summary_has_every_promised_key() -> None:
    summary = summary_of(GOOD, nodes=NODES, wall_s=501.23)
    assert summary.keys() >= PROMISED
    assert {"peer", "accepted", "rejected", "tokens"} <= summary["nodes"][0].keys()
    assert (summary["chunks_from_peers"], summary["wall_s"], summary["steps"]) == (23, 501.2, 40)
    assert [node["chunks_from_peers"] for node in summary["nodes"]] == [20, 3]


def test_a_node_that_never_answered_has_no_chunks_to_tell() -> None:
    summary = summary_of(GOOD, nodes={"node-a": NODES["node-a"], "node-b": None}, wall_s=1.0)
    assert summary["chunks_from_peers"] == 20
    assert "chunks_from_peers" not in summary["nodes"][1]


def test_the_learner_s_file_is_read_back(tmp_path) -> None:
    write_summary(GOOD, tmp_path / "summary.json")
    assert read_account((tmp_path / "summary.json").read_text()) == GOOD


def test_a_good_demo_keeps_every_promise() -> None:
    assert broken(GOOD) == {}


@pytest.mark.parametrize(
    ("changes", "promise", "is_hard"),
    [
        ({"steps": 39}, "every step is done", True),
        ({"reward_last10": 0.37}, "the mean reward rises by 0.35", False),
        ({"reward_first5": None, "reward_last10": None}, "the mean reward rises by 0.35", False),
        ({"nodes": (GOOD.nodes[0], replace(GOOD.nodes[1], accepted=0))}, "every node contributes", True),
        ({"nodes": GOOD.nodes[:1]}, "every node contributes", True),
        ({"audits_failed": 1}, "audits find honest work honest", True),
        ({"audits_done": 0}, "audits find honest work honest", True),
        *(({"trust": replace(GOOD.trust, audited_share_steady=share)}, COST, False) for share in (0.051, None)),
    ],
)
def test_what_is_missed_is_told(changes, promise: str, is_hard: bool) -> None:
    assert broken(replace(GOOD, **changes)) == {promise: is_hard}


def test_weights_from_the_learner_alone_and_a_slow_run_are_told() -> None:
    alone = {name: status.model_copy(update={"chunks_from_peers": 0}) for name, status in NODES.items()}
    assert broken(GOOD, nodes=alone) == {"nodes pass weights on": False}
    assert broken(GOOD, wall_s=901.0) == {"it takes 900 s at most": False}
