"""The accounts of a run, from its ledger: what a person wants to know when it is over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rollmesh_learner.audit.drawing import MEANS
from rollmesh_learner.members.standing import Record
from rollmesh_learner.records import audits, restore, rollbacks
from rollmesh_learner.records.ledger import Ledger, number, real
from rollmesh_learner.work.lengths import Fate
from rollmesh_peer.weights.durable import write_file


@dataclass(frozen=True, kw_only=True)
class NodeAccount:
    """What one node contributed."""

    peer: str
    name: str
    accepted: int
    rejected: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TrustAccount:
    """What checking cost, and what it found too late. Tokens include prompts; shares are of what was accepted."""

    audited_tokens: int
    work_tokens: int
    audited_share: float | None
    audited_share_steady: float | None
    """The same of nodes in full standing alone: what audits cost once a run has settled."""
    consumed_bad: dict[str, int]
    """Step -> rollouts that it trained on and that failed an audit afterwards."""
    lengths: dict[str, dict[Fate, int]]
    """Least tokens of a bucket (a power of two) -> completions consumed and dropped."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run so far. Rewards are means over steps; bytes are those of one version."""

    run: str
    steps: int
    reward_first5: float | None
    reward_last10: float | None
    nodes: tuple[NodeAccount, ...]
    versions_published: int
    patch_bytes_mean: float | None
    full_bytes: int
    audits_done: int
    audits_failed: int
    staleness_max: int | None
    bubble_fraction: float
    rollbacks: tuple[dict[str, object], ...]
    """What tripped, from which step to which the run went back, and how many rollouts were voided; oldest first."""
    rollouts: dict[str, int]
    """How many rollouts are in each state: their sum is everything that was ever acknowledged."""
    trust: TrustAccount
    checkpoint: str | None


async def summarise(
    ledger: Ledger,
    *,
    run: str,
    full_bytes: int,
    bubble_fraction: float,
    checkpoint: Path | None,
) -> RunSummary:
    """The summary of the run in ``ledger``."""
    metrics = [
        json.loads(str(text))
        for (text,) in await ledger.fetch(
            "SELECT metrics FROM steps WHERE state IN ('trained', 'final') AND metrics IS NOT NULL ORDER BY step"
        )
    ]
    rewards = [float(line["reward"]) for line in metrics]
    ((versions,),) = await ledger.fetch("SELECT count(*) FROM versions WHERE state IN ('published', 'orphaned')")
    ((patch_bytes,),) = await ledger.fetch("SELECT avg(payload_bytes) FROM versions WHERE version > 1")
    verdicts = {
        str(verdict): number(count)
        for verdict, count in await ledger.fetch("SELECT verdict, count(*) FROM audits GROUP BY verdict")
    }
    return RunSummary(
        run=run,
        steps=len(metrics),
        reward_first5=_mean(rewards[:5]),
        reward_last10=_mean(rewards[-10:]),
        nodes=await _nodes(ledger),
        versions_published=number(versions),
        patch_bytes_mean=None if patch_bytes is None else real(patch_bytes),
        full_bytes=full_bytes,
        audits_done=sum(verdicts.values()),
        audits_failed=verdicts.get("hard", 0),
        staleness_max=max((int(line["age_max"]) for line in metrics), default=None),
        bubble_fraction=bubble_fraction,
        rollbacks=tuple(rollback.as_record() for rollback in await rollbacks.all_rollbacks(ledger)),
        rollouts=await restore.accounts(ledger),
        trust=await _trust(ledger),
        checkpoint=str(checkpoint) if checkpoint else None,
    )


async def _trust(ledger: Ledger) -> TrustAccount:
    tokens = await audits.audit_tokens(ledger)
    means = await audits.draw_means(ledger, MEANS)
    return TrustAccount(
        audited_tokens=tokens.audited,
        work_tokens=tokens.work,
        audited_share=tokens.audited / tokens.work if tokens.work else None,
        audited_share_steady=means.drawn_tokens / means.work_tokens if means and means.work_tokens else None,
        consumed_bad={str(step): bad for step, bad in (await audits.consumed_bad(ledger)).items()},
        lengths={str(bucket): row for bucket, row in (await audits.lengths(ledger)).items()},
    )


def write_summary(summary: RunSummary, path: Path) -> None:
    """``summary`` as JSON, whole or not at all."""
    write_file(path, (json.dumps(asdict(summary), indent=1) + "\n").encode())


async def _nodes(ledger: Ledger) -> tuple[NodeAccount, ...]:
    tokens = {
        str(node): number(count)
        for node, count in await ledger.fetch("SELECT node, sum(length(tokens)) / 4 FROM rollouts GROUP BY node")
    }
    accounts = []
    for peer, name, standing in await ledger.fetch("SELECT peer, name, standing FROM nodes ORDER BY first_seen"):
        record = Record(**json.loads(str(standing)))
        accounts.append(
            NodeAccount(
                peer=str(peer),
                name=str(name),
                accepted=record.accepted,
                rejected=record.rejected,
                tokens=tokens.get(str(peer), 0),
            )
        )
    return tuple(accounts)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
