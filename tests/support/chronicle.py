"""The history of a run as its ledger tells it, looked at again and again: what once was so must stay accounted for.

:meth:`Chronicle.look` reads a copy of the ledger and fails when something that was seen before is gone or has changed
in a way that no fault excuses. :meth:`Chronicle.conclude` checks the accounts of a run that is complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tests.support.system import System

FETCHED = re.compile(r"fetched version (\d+): (\d+) bytes")
HELD = re.compile(r"node\.weights: .*\bversion=(\d+)")
WAITING = {"scoring", "auditing", "ready", "assigned"}


@dataclass
class Chronicle:
    """What was ever seen in the ledger of one run."""

    system: System
    staleness: int = 2
    groups_per_step: int = 2
    samples_per_group: int = 4
    rollouts: dict[tuple[bytes, int], str] = field(default_factory=dict)
    """(lease, sample) -> state, as last seen."""
    versions: dict[int, tuple[float, bytes | None, bytes | None]] = field(default_factory=dict)
    """Number -> when it was reserved, root and manifest."""
    receipts: dict[bytes, bytes] = field(default_factory=dict)
    orphaned: set[int] = field(default_factory=set)

    def look(self) -> dict[str, int]:
        """Compare the ledger with everything seen before; returns how many rollouts are in each state."""
        self._look_at_rollouts()
        self._look_at_receipts()
        self._look_at_versions()
        self._look_at_consumed()
        counts: dict[str, int] = {}
        for state in self.rollouts.values():
            counts[state] = counts.get(state, 0) + 1
        return counts

    def accepted_of(self, peer: str) -> int:
        """How many rollouts of one node the ledger holds, whatever became of them."""
        ((count,),) = self.system.rows("SELECT count(*) FROM rollouts WHERE node = ?", peer)
        return int(count)

    def conclude(self, *, steps: int) -> None:
        """The accounts of a complete run."""
        counts = self.look()
        assert not WAITING & counts.keys() - {"ready", "scoring", "auditing"}, "the steps are final, their rollouts too"
        assert counts["consumed"] == steps * self.groups_per_step * self.samples_per_group
        rows = self.system.rows("SELECT step, state, metrics FROM steps ORDER BY step")
        assert [(step, state) for step, state, _ in rows] == [(step, "final") for step in range(steps)]
        assert [json.loads(metrics)["step"] for _, _, metrics in rows] == list(range(steps))
        assert [line["step"] for line in self.system.metrics()] == list(range(steps))
        summary = self.system.summary()
        assert summary["steps"] == steps
        assert sum(summary["rollouts"].values()) == len(self.rollouts), "everything acknowledged is counted"
        assert summary["staleness_max"] <= self.staleness
        assert summary["audits_failed"] == 0
        hard = "SELECT peer, code FROM offences WHERE code NOT IN ('lease.expired', 'result.stale')"
        assert not self.system.rows(hard), "an honest node was accused"

    # --- pieces ------------------------------------------------------------------------------------------------------
    def _look_at_rollouts(self) -> None:
        rows = self.system.rows("SELECT lease_id, sample, state FROM rollouts")
        now = {(lease, sample): state for lease, sample, state in rows}
        assert not self.rollouts.keys() - now.keys(), "an acknowledged rollout is gone"
        for key, before in self.rollouts.items():
            if before not in WAITING:
                assert now[key] == before, f"a rollout was {before} and is {now[key]} now"
        self.rollouts = now

    def _look_at_receipts(self) -> None:
        rows = self.system.rows("SELECT lease_id, receipt FROM leases WHERE receipt IS NOT NULL")
        now = dict(rows)
        assert self.receipts.items() <= now.items(), "a receipt changed"
        assert {lease for lease, _ in self.rollouts} <= now.keys(), "a rollout was taken without a receipt"
        self.receipts = now

    def _look_at_versions(self) -> None:
        rows = self.system.rows("SELECT version, step, root, manifest, state, reserved_at FROM versions")
        now = {version: (at, root, manifest) for version, _, root, manifest, _, at in rows}
        orphaned = {version for version, *_, state, _ in rows if state == "orphaned"}
        for version, (reserved_at, root, manifest) in self.versions.items():
            assert now[version][0] == reserved_at, f"the number {version} was reserved twice"
            assert root is None or now[version][1:] == (root, manifest), f"version {version} changed"
            fresh = [number for number in now if number not in self.versions]
            assert not fresh or min(fresh) > version, "a new version has an old number"
        assert self.orphaned <= orphaned, "a lost version came back"
        self.versions, self.orphaned = now, orphaned

    def _look_at_consumed(self) -> None:
        rows = self.system.rows(
            "SELECT r.group_id, r.sample, r.trained_step, r.step, r.version, r.root, v.root, v.state"
            " FROM rollouts r JOIN versions v ON v.version = r.version WHERE r.state IN ('assigned', 'consumed')"
        )
        places = [(group, sample) for group, sample, *_ in rows]
        assert len(places) == len(set(places)), "a sample was trained on twice"
        for group, _, trained, made_at, version, root, published, state in rows:
            assert 0 <= trained - made_at <= self.staleness, f"group {group} was {trained - made_at} steps old"
            assert root == published, "a rollout names another root than its version"
            assert state == "published", f"a rollout of the lost version {version} was trained on"
        taken: dict[int, set[int]] = {}
        for group, _, trained, *_ in rows:
            taken.setdefault(trained, set()).add(group)
        assert all(len(groups) == self.groups_per_step for groups in taken.values())
        assert len(places) == sum(map(len, taken.values())) * self.samples_per_group, "a group was trained on in part"


def fetched(log: str) -> list[tuple[int, int]]:
    """What a node's log says it downloaded: (version, bytes), in order."""
    return [(int(version), int(size)) for version, size in FETCHED.findall(log)]


def held(log: str) -> list[int]:
    """The versions that a node's log says it held, in order."""
    return [int(version) for version in HELD.findall(log)]
