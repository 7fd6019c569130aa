"""What a demo came to: its summary, and whether it showed what it must show. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollmesh_learner.records.summary import NodeAccount, RunSummary, TrustAccount
from rollmesh_peer.status.words import count
from rollmesh_protocol.status import NodeStatus

GAIN_WANTED: Final = 0.35
"""How far the mean reward rises, from the first five steps to the last ten; seen: 0.03 to 0.8."""
COST_ALLOWED: Final = 0.05
"""Of the tokens of prompts and answers by nodes in full standing, what is recomputed."""
WALL_WANTED_S: Final = 900.0
"""On two cores, from the first process to the last one's end."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a demo must show. ``is_hard`` ones depend on nothing but the program being right."""

    promise: str
    shown: str
    is_kept: bool
    is_hard: bool


def read_account(text: str) -> RunSummary:
    """The learner's ``summary.json``, back in its own form."""
    fields = json.loads(text)
    accounts = tuple(NodeAccount(**account) for account in fields.pop("nodes"))
    trust, rollbacks = TrustAccount(**fields.pop("trust")), tuple(fields.pop("rollbacks"))
    return RunSummary(nodes=accounts, trust=trust, rollbacks=rollbacks, **fields)


def summary_of(learner: RunSummary, *, nodes: Mapping[str, NodeStatus | None], wall_s: float) -> dict[str, object]:
    """The content of ``summary.json``: the learner's account, and what the nodes told of their downloads."""
    told = {node.peer: node for node in nodes.values() if node is not None}
    return {
        "steps": learner.steps,
        "reward_first5": learner.reward_first5,
        "reward_last10": learner.reward_last10,
        "wall_s": round(wall_s, 1),
        "nodes": [_node(account, told.get(account.peer)) for account in learner.nodes],
        "versions_published": learner.versions_published,
        "patch_bytes_mean": learner.patch_bytes_mean,
        "full_bytes": learner.full_bytes,
        "chunks_from_peers": sum(node.chunks_from_peers for node in told.values()),
        "chunks_from_learner": sum(node.chunks_from_learner for node in told.values()),
        "audits_done": learner.audits_done,
        "audits_failed": learner.audits_failed,
        "audited_share_steady": learner.trust.audited_share_steady,
        "staleness_max": learner.staleness_max,
        "bubble_fraction": learner.bubble_fraction,
        "checkpoint": learner.checkpoint,
        "rollouts": learner.rollouts,
        "run": learner.run,
    }


def _node(account: NodeAccount, told: NodeStatus | None) -> dict[str, object]:
    own: dict[str, object] = {
        "peer": account.peer,
        "name": account.name,
        "accepted": account.accepted,
        "rejected": account.rejected,
        "tokens": account.tokens,
    }
    if told is not None:
        own |= {
            "chunks_from_peers": told.chunks_from_peers,
            "chunks_from_learner": told.chunks_from_learner,
            "bytes_served": told.bytes_served,
        }
    return own


def findings(
    learner: RunSummary, *, nodes: Mapping[str, NodeStatus | None], steps: int, wall_s: float
) -> tuple[Finding, ...]:
    """What was to be shown and what was; ``steps`` is what the run had to do."""
    first, last = learner.reward_first5, learner.reward_last10
    gain = None if first is None or last is None else last - first
    from_peers = sum(node.chunks_from_peers for node in nodes.values() if node is not None)
    chunks = from_peers + sum(node.chunks_from_learner for node in nodes.values() if node is not None)
    cost = learner.trust.audited_share_steady
    workers = [account for account in learner.nodes if account.accepted]
    return (
        Finding(
            promise="every step is done",
            shown=f"{count(learner.steps)} of {count(steps)}",
            is_kept=learner.steps == steps,
            is_hard=True,
        ),
        Finding(
            promise=f"the mean reward rises by {GAIN_WANTED:g}",
            shown="no step was trained" if gain is None else f"from {first:.3f} to {last:.3f}, by {gain:.3f}",
            is_kept=gain is not None and gain >= GAIN_WANTED,
            is_hard=False,
        ),
        Finding(
            promise="every node contributes",
            shown=", ".join(f"{account.name} {count(account.accepted)}" for account in learner.nodes)
            + " accepted rollouts",
            is_kept=len(workers) >= len(nodes),
            is_hard=True,
        ),
        Finding(
            promise="nodes pass weights on",
            shown=f"{count(from_peers)} of {count(chunks)} chunks came from the other node",
            is_kept=from_peers > 0,
            is_hard=False,
        ),
        Finding(
            promise="audits find honest work honest",
            shown=f"{count(learner.audits_done)} done, {count(learner.audits_failed)} failed",
            is_kept=learner.audits_done > 0 and learner.audits_failed == 0,
            is_hard=True,
        ),
        Finding(
            promise=f"of nodes in full standing they recompute {100 * COST_ALLOWED:g} % of the tokens at most",
            shown="no node came that far" if cost is None else f"{100 * cost:.1f} %",
            is_kept=cost is not None and cost <= COST_ALLOWED,
            is_hard=False,
        ),
        Finding(
            promise=f"it takes {WALL_WANTED_S:g} s at most",
            shown=f"{wall_s:.0f} s",
            is_kept=wall_s <= WALL_WANTED_S,
            is_hard=False,
        ),
    )
