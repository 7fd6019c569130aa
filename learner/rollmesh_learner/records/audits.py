"""What the ledger remembers of audits and of abandoned work: so that a restart forgets nothing of trust."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from rollmesh_learner.audit.weighing import Means
from rollmesh_learner.members.withheld import WithheldBook
from rollmesh_learner.records.ledger import Ledger, Row, blob, number, real
from rollmesh_learner.records.restore import ROLLOUT_COLUMNS, read_rollout
from rollmesh_learner.work.groups import RolloutKey, StoredRollout
from rollmesh_learner.work.lengths import Fate, histogram
from rollmesh_protocol.verdicts.margins import Thresholds, keep_recent

Figures = tuple[int, int, int]
"""Of one audited rollout: tokens, margins over low, margins over high."""

_WINDOW_ROWS: Final = 50_000
_LEASES: Final = 5_000
_FATES: Final[dict[str, Fate]] = {"assigned": "consumed", "consumed": "consumed", "stale": "dropped"}
_UNSEEN: Final = (
    "r.state IN ('assigned', 'consumed') AND NOT EXISTS"
    " (SELECT 1 FROM audits a WHERE a.lease_id = r.lease_id AND a.sample = r.sample)"
)
"""Of ``rollouts r``: some step consumed it, no rollback undid that step, and no audit has seen it."""


@dataclass(frozen=True, kw_only=True)
class AuditTokens:
    """Tokens, prompts included."""

    audited: int
    work: int
    """Of everything accepted."""


@dataclass(frozen=True, kw_only=True)
class TrustMemory:
    """What was known of trust when the learner ended."""

    margins: dict[str, list[Figures]]
    """By node, of its last audited rollouts, the oldest first."""
    withheld: WithheldBook
    means: Means | None
    tokens: AuditTokens
    bad: dict[int, int]


async def load_trust(ledger: Ledger, thresholds: Thresholds, *, means_name: str) -> TrustMemory:
    """Everything of it."""
    return TrustMemory(
        margins=await recent_margins(ledger, thresholds),
        withheld=await withheld_leases(ledger),
        means=await draw_means(ledger, means_name),
        tokens=await audit_tokens(ledger),
        bad=await consumed_bad(ledger),
    )


async def recent_margins(ledger: Ledger, thresholds: Thresholds) -> dict[str, list[Figures]]:
    """The windows over which nodes are judged, as they were: after a soft failure a window begins anew."""
    found = await ledger.fetch(
        "SELECT node, verdict, tokens, over_half, over_one FROM audits ORDER BY at DESC LIMIT ?", _WINDOW_ROWS
    )
    windows: dict[str, list[Figures]] = {}
    closed: set[str] = set()
    for node, verdict, tokens, low, high in found:
        if verdict == "soft":
            closed.add(str(node))
        if node not in closed:
            windows.setdefault(str(node), []).insert(0, (number(tokens), number(low), number(high)))
    for window in windows.values():
        keep_recent(window, thresholds)
    return windows


async def withheld_leases(ledger: Ledger) -> WithheldBook:
    """What nodes delivered and let go of lately."""
    book = WithheldBook()
    for node, lease_id, reward, tokens in reversed(
        await ledger.fetch(
            "SELECT r.node, r.lease_id, r.reward, length(r.tokens) / 4 FROM"
            " (SELECT lease_id FROM leases WHERE state = 'done' ORDER BY issued_at DESC LIMIT ?) l"
            " JOIN rollouts r ON r.lease_id = l.lease_id WHERE r.reward IS NOT NULL AND r.state != 'scoring'",
            _LEASES,
        )
    ):
        book.delivered(str(node), blob(lease_id), reward=real(reward), tokens=number(tokens))
    for node, lease_id, samples, sample, reward, tokens in reversed(
        await ledger.fetch(
            "SELECT l.node, l.lease_id, l.samples, r.sample, r.reward, length(r.tokens) / 4 FROM"
            " (SELECT * FROM leases WHERE state IN ('returned', 'expired') ORDER BY issued_at DESC LIMIT ?) l"
            " JOIN rollouts r ON r.group_id = l.group_id AND r.node != l.node"
            " WHERE r.reward IS NOT NULL AND r.state != 'scoring'",
            _LEASES,
        )
    ):
        if number(sample) in blob(samples):
            book.abandoned(str(node), blob(lease_id), reward=real(reward), tokens=number(tokens))
    return book


async def draw_means(ledger: Ledger, name: str) -> Means | None:
    """The running means of the draw; None in a run without steady nodes so far."""
    found = await ledger.fetch("SELECT value FROM meta WHERE name = ?", name)
    return Means(**json.loads(blob(found[0][0]))) if found else None


async def audit_tokens(ledger: Ledger) -> AuditTokens:
    """What audits have cost, and of what."""
    ((work,),) = await ledger.fetch(
        "SELECT coalesce(sum(length(r.tokens) + length(g.prompt)), 0) / 4 FROM rollouts r"
        " JOIN groups g ON g.group_id = r.group_id WHERE r.reward IS NOT NULL"
    )
    ((audited,),) = await ledger.fetch(
        "SELECT coalesce(sum(a.tokens + length(g.prompt) / 4 + coalesce((SELECT sum(length(g.prompt) / 4"
        " + s.first_token) FROM stretches s WHERE s.lease_id = a.lease_id AND s.sample = a.sample), 0)), 0)"
        " FROM audits a"
        " JOIN rollouts r ON r.lease_id = a.lease_id AND r.sample = a.sample JOIN groups g ON g.group_id = r.group_id"
    )
    return AuditTokens(audited=number(audited), work=number(work))


async def consumed_bad(ledger: Ledger) -> dict[int, int]:
    """Step -> rollouts that it consumed and that failed an audit afterwards."""
    found = await ledger.fetch(
        "SELECT r.trained_step, count(*) FROM audits a JOIN rollouts r ON r.lease_id = a.lease_id"
        " AND r.sample = a.sample WHERE a.verdict = 'hard' AND r.state IN ('assigned', 'consumed')"
        " GROUP BY r.trained_step ORDER BY r.trained_step"
    )
    return {number(step): number(count) for step, count in found}


async def consuming_step(ledger: Ledger, key: RolloutKey) -> int | None:
    """The step that consumed a rollout; None when none did."""
    found = await ledger.fetch(
        "SELECT trained_step FROM rollouts WHERE lease_id = ? AND sample = ? AND state IN ('assigned', 'consumed')",
        *key,
    )
    return number(found[0][0]) if found else None


async def lengths(ledger: Ledger) -> dict[int, dict[Fate, int]]:
    """Completions consumed and dropped, by bucket of lengths."""
    found = await ledger.fetch(
        "SELECT state, length(tokens) / 4, count(*) FROM rollouts WHERE state IN ('assigned', 'consumed', 'stale')"
        " GROUP BY state, length(tokens) / 4"
    )
    return histogram((_FATES[str(state)], number(tokens), number(count)) for state, tokens, count in found)


async def unaudited_consumed(ledger: Ledger, node: str, *, most: int) -> list[tuple[StoredRollout, bytes, int]]:
    """Up to ``most`` consumed rollouts of ``node`` that no audit has seen, with prompt and step, the newest first."""
    found = await ledger.fetch(
        f"SELECT g.prompt, r.trained_step, {ROLLOUT_COLUMNS} FROM rollouts r JOIN groups g ON g.group_id = r.group_id"  # noqa: S608 - a constant
        f" WHERE r.node = ? AND {_UNSEEN} ORDER BY r.trained_step DESC, r.received_at DESC LIMIT ?",
        node,
        most,
    )
    return [_read_consumed(row) for row in found]


async def num_unaudited_consumed(ledger: Ledger, node: str) -> int:
    """How many there are in all."""
    ((count,),) = await ledger.fetch(f"SELECT count(*) FROM rollouts r WHERE r.node = ? AND {_UNSEEN}", node)  # noqa: S608
    return number(count)


def _read_consumed(row: Row) -> tuple[StoredRollout, bytes, int]:
    prompt, step, *rest = row
    return read_rollout(tuple(rest)), blob(prompt), number(step)
