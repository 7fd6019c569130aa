"""The ledger's statements, one function each: how the state of :mod:`rollmesh_learner.work.groups` is written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rollmesh_learner.members.standing import Record
from rollmesh_learner.records.ledger import Statement
from rollmesh_learner.work.groups import Group, LeaseRecord, LeaseState, RolloutState, StoredRollout, Stretch
from rollmesh_protocol.messages import PolicyHeader

MADE_BEYOND: Final = (
    "(step > ?1 OR EXISTS (SELECT 1 FROM stretches s WHERE s.lease_id = rollouts.lease_id"
    " AND s.sample = rollouts.sample AND s.step > ?1))"
)
"""Of ``rollouts``: any token was made with weights of a later step than the first parameter."""


def insert_group(group: Group) -> Statement:
    """A group appears together with its first lease."""
    prompt = group.prompt
    return Statement(
        "INSERT INTO groups (group_id, environment, item, prompt, state) VALUES (?, ?, ?, ?, ?)",
        (group.group_id, prompt.environment, prompt.item, prompt.prompt, group.state),
    )


def update_group(group: Group, *, step: int | None = None, why: str = "") -> Statement:
    """A group was assigned to a step, or given up."""
    return Statement(
        "UPDATE groups SET state = ?, step = ?, why = ? WHERE group_id = ?", (group.state, step, why, group.group_id)
    )


def insert_lease(lease: LeaseRecord, *, wall_time: float) -> Statement:
    """A lease is given out."""
    return Statement(
        "INSERT INTO leases (lease_id, node, group_id, samples, version, step, root, duration_s, issued_at, state,"
        " swap_mode) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            lease.lease_id, lease.node, lease.group_id, bytes(lease.indices), lease.version, lease.step, lease.root,
            lease.duration_s, wall_time, lease.state, lease.swap_mode,
        ),
    )  # fmt: skip


def update_lease(lease: LeaseRecord) -> Statement:
    """A result was received for a lease: its digest and its receipt."""
    return Statement(
        "UPDATE leases SET state = ?, result_digest = ?, receipt = ? WHERE lease_id = ?",
        (lease.state, lease.result_digest, lease.receipt, lease.lease_id),
    )


def end_lease(lease_id: bytes, state: LeaseState) -> Statement:
    """A lease ended without a result."""
    return Statement("UPDATE leases SET state = ? WHERE lease_id = ?", (state, lease_id))


def insert_rollout(rollout: StoredRollout, *, wall_time: float) -> list[Statement]:
    """A rollout was accepted: a row, and one more for each stretch of it that newer weights drew."""
    row = Statement(
        "INSERT INTO rollouts (lease_id, sample, group_id, node, version, step, root, seed, tokens, logprobs, finish,"
        " received_at, drawn, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            rollout.lease_id, rollout.sample, rollout.group_id, rollout.node, rollout.version, rollout.step,
            rollout.root, rollout.seed.to_bytes(8, "little"), rollout.tokens, rollout.logprobs, rollout.finish,
            wall_time, int(rollout.drawn), rollout.state,
        ),
    )  # fmt: skip
    return [row, *(_insert_stretch(rollout, stretch) for stretch in rollout.later)]


def _insert_stretch(rollout: StoredRollout, stretch: Stretch) -> Statement:
    return Statement(
        "INSERT INTO stretches (lease_id, sample, first_token, version, step, root) VALUES (?, ?, ?, ?, ?, ?)",
        (rollout.lease_id, rollout.sample, stretch.first_token, stretch.version, stretch.step, stretch.root),
    )


def update_rollout(rollout: StoredRollout, *, score_error: str | None = None) -> Statement:
    """A rollout was scored, drawn or audited."""
    return Statement(
        "UPDATE rollouts SET state = ?, drawn = ?, reward = ?, exact_logprobs = ?,"
        " score_error = coalesce(?, score_error) WHERE lease_id = ? AND sample = ?",
        (
            rollout.state, int(rollout.drawn), rollout.reward, rollout.exact_logprobs, score_error, rollout.lease_id,
            rollout.sample,
        ),
    )  # fmt: skip


def assign_rollouts(rollouts: Sequence[StoredRollout], *, step: int) -> list[Statement]:
    """Rollouts became part of the batch of ``step``."""
    return [
        Statement(
            "UPDATE rollouts SET state = 'assigned', trained_step = ? WHERE lease_id = ? AND sample = ?",
            (step, rollout.lease_id, rollout.sample),
        )
        for rollout in rollouts
    ]


def end_rollouts(rollouts: Sequence[StoredRollout], state: RolloutState) -> list[Statement]:
    """Rollouts will not be trained on."""
    return [
        Statement(
            "UPDATE rollouts SET state = ? WHERE lease_id = ? AND sample = ?",
            (state, rollout.lease_id, rollout.sample),
        )
        for rollout in rollouts
    ]


def insert_step(step: int, *, wall_time: float) -> Statement:
    """A batch was assigned to ``step``."""
    return Statement(
        "INSERT OR REPLACE INTO steps (step, state, assigned_at) VALUES (?, 'assigned', ?)", (step, wall_time)
    )


def step_trained(step: int, metrics: str) -> Statement:
    """The trainer has done a step; its metrics as JSON."""
    return Statement("UPDATE steps SET state = 'trained', metrics = ? WHERE step = ?", (metrics, step))


def steps_final(below: int) -> list[Statement]:
    """Every step before ``below`` is in a durable checkpoint: its rollouts can never be trained on again."""
    return [
        Statement("UPDATE steps SET state = 'final' WHERE step < ? AND state IN ('assigned', 'trained')", (below,)),
        Statement("UPDATE rollouts SET state = 'consumed' WHERE state = 'assigned' AND trained_step < ?", (below,)),
        Statement("UPDATE groups SET state = 'consumed' WHERE state = 'assigned' AND step < ?", (below,)),
    ]


def reserve_version(version: int, *, step: int, wall_time: float) -> Statement:
    """A version number is taken, whatever comes of it."""
    return Statement(
        "INSERT INTO versions (version, step, state, reserved_at) VALUES (?, ?, 'reserved', ?)",
        (version, step, wall_time),
    )


def version_published(header: PolicyHeader) -> Statement:
    """A version is on disk and may be announced."""
    return Statement(
        "UPDATE versions SET state = 'published', root = ?, manifest = ?, payload_bytes = ? WHERE version = ?",
        (header.root, header.manifest, header.payload_bytes, header.version),
    )


def put_meta(name: str, value: bytes) -> Statement:
    """A named value of the run."""
    return Statement("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", (name, value))


def put_node(peer: str, *, name: str, record: Record, wall_time: float, block: str = "") -> Statement:
    """A node's standing. ``block`` is where its key came from when it was new; it stays as it was first written."""
    return Statement(
        "INSERT INTO nodes (peer, name, first_seen, standing, block) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (peer) DO UPDATE SET name = excluded.name, standing = excluded.standing",
        (peer, name, wall_time, json.dumps(asdict(record)), block),
    )


def insert_offence(peer: str, *, code: str, detail: str, wall_time: float) -> Statement:
    """A node did something wrong."""
    return Statement(
        "INSERT INTO offences (peer, code, detail, at) VALUES (?, ?, ?, ?)", (peer, code, detail[:500], wall_time)
    )


def use_invite(token: bytes, *, peer: str, wall_time: float) -> Statement:
    """An invitation was used; it belongs to ``peer`` from now on."""
    return Statement(
        "INSERT OR IGNORE INTO invites (token, used_by, used_at) VALUES (?, ?, ?)", (token, peer, wall_time)
    )
