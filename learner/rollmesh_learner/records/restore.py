"""Going back to a checkpoint: the ledger's rows become the book again, and what the lost steps touched is undone.

Used when the learner starts and when its trainer died. With weights of step c at hand:

- batches of steps from c on go back into the book; a rollout among them of which any token was made with weights of a
  step beyond c is orphaned, because those weights no longer exist in the history, and so is every such rollout that
  waits;
- published versions of steps beyond c are orphaned, and their leases void; version numbers are never used again;
- everything acknowledged is counted in exactly one state afterwards.

Meanwhile the book is suspended, and versions and book change in one moment at the end: nobody can be given work for
weights that are lost, and nothing that comes in is weighed against a book that does not know it yet.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Final

from rollmesh_learner.members.admission import Registrations
from rollmesh_learner.members.standing import Record
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger, Row, Statement, blob, number, real
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import Group, LeaseRecord, Prompt, Sample, StoredRollout, Stretch
from rollmesh_protocol.messages import Head

_log = logging.getLogger("rollmesh.learner.restore")

_LIVE: Final = "('scoring', 'auditing', 'ready')"
ROLLOUT_COLUMNS: Final = (
    "r.lease_id, r.sample, r.group_id, r.node, r.version, r.step, r.root, r.seed, r.tokens, r.logprobs, r.finish,"
    " r.drawn, r.reward, r.exact_logprobs, r.state,"
    " (SELECT json_group_array(json_array(s.first_token, s.version, s.step, hex(s.root))) FROM stretches s"
    " WHERE s.lease_id = r.lease_id AND s.sample = r.sample)"
)
"""What :func:`read_rollout` reads, of ``rollouts r``."""
_WAITING: Final = (
    f"SELECT {ROLLOUT_COLUMNS} FROM rollouts r JOIN groups g ON g.group_id = r.group_id"  # noqa: S608 - a constant
    f" WHERE g.state = 'live' AND r.state IN {_LIVE}"
)
_LEASE: Final = (
    "lease_id, node, group_id, samples, version, step, root, duration_s, state, result_digest, receipt, swap_mode"
)


@dataclass(frozen=True, kw_only=True)
class PublishedVersion:
    """A version that went out, as the ledger has it."""

    head: Head
    manifest: bytes
    is_orphaned: bool


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What the ledger knew beside the book."""

    published: tuple[PublishedVersion, ...]
    """In order of their numbers."""
    rolled_back: int
    orphaned: int


async def rewind(ledger: Ledger, book: Book, versions: Versions, *, step: int, now: float) -> Restored:
    """Bring ledger, ``book`` and ``versions`` to where the weights of ``step`` are the newest there are."""
    book.suspend()
    await ledger.commit(*rows.steps_final(step))
    before = await _count(ledger)
    await ledger.commit(*_undo_beyond(step))
    after = await _count(ledger)
    published = await published_versions(ledger)
    ((newest,),) = await ledger.fetch("SELECT coalesce(max(group_id), -1) FROM groups")
    groups, leases = await _load(ledger, samples=book.rules.samples_per_group, now=now)
    versions.reset(
        (version.head for version in published if not version.is_orphaned),
        undone=(version.head for version in published if version.is_orphaned),
    )
    book.resume(groups, leases, next_group=number(newest) + 1, next_step=step)
    await ledger.commit(*book.drop_stale())
    rolled_back = before.get("assigned", 0) - after.get("assigned", 0)
    orphaned = after.get("orphaned", 0) - before.get("orphaned", 0)
    if rolled_back or orphaned:
        _log.info("back at step %d: %d rollouts go back, %d are orphaned", step, rolled_back, orphaned)
    return Restored(published=published, rolled_back=rolled_back, orphaned=orphaned)


async def load_records(ledger: Ledger) -> dict[str, Record]:
    """The standing of every node that was ever seen."""
    found = await ledger.fetch("SELECT peer, standing FROM nodes")
    return {str(peer): Record(**json.loads(str(standing))) for peer, standing in found}


async def load_registrations(ledger: Ledger, *, per_block: int, now: float, wall_time: float) -> Registrations:
    """How many new keys each block of addresses has brought; ``now`` and ``wall_time`` are one moment on two clocks."""
    registrations = Registrations(per_block=per_block)
    found = await ledger.fetch("SELECT block, first_seen FROM nodes WHERE block != '' ORDER BY first_seen")
    registrations.recall((str(block), now - max(0.0, wall_time - real(first_seen))) for block, first_seen in found)
    return registrations


async def recall_lease(ledger: Ledger, lease_id: bytes) -> LeaseRecord | None:
    """A lease that ended so long ago that only the ledger knows it; None when there never was one."""
    found = await ledger.fetch(f"SELECT {_LEASE} FROM leases WHERE lease_id = ?", lease_id)  # noqa: S608 - a constant
    return _read_lease(found[0], now=0.0) if found else None


async def accounts(ledger: Ledger) -> dict[str, int]:
    """How many rollouts are in each state; their sum is everything that was ever acknowledged."""
    return await _count(ledger)


def _undo_beyond(step: int) -> list[Statement]:
    return [
        Statement("UPDATE versions SET state = 'orphaned' WHERE state = 'published' AND step > ?", (step,)),
        Statement(
            "UPDATE steps SET state = 'rolled_back' WHERE step >= ? AND state IN ('assigned', 'trained')", (step,)
        ),
        Statement(
            "UPDATE rollouts SET state = 'ready', trained_step = NULL WHERE state = 'assigned' AND trained_step >= ?",
            (step,),
        ),
        Statement("UPDATE groups SET state = 'live', step = NULL WHERE state = 'assigned' AND step >= ?", (step,)),
        Statement(
            "UPDATE leases SET state = 'void' WHERE step > ? AND state IN ('open', 'returned', 'expired')", (step,)
        ),
        Statement(f"UPDATE rollouts SET state = 'orphaned' WHERE state IN {_LIVE} AND {rows.MADE_BEYOND}", (step,)),  # noqa: S608 - a constant
    ]


async def _load(ledger: Ledger, *, samples: int, now: float) -> tuple[list[Group], list[LeaseRecord]]:
    groups: dict[int, Group] = {}
    for group_id, environment, item, prompt in await ledger.fetch(
        "SELECT group_id, environment, item, prompt FROM groups WHERE state = 'live' ORDER BY group_id"
    ):
        content = Prompt(environment=number(environment), item=str(item), prompt=blob(prompt))
        groups[number(group_id)] = Group(number(group_id), content, [Sample(i) for i in range(samples)])
    for row in await ledger.fetch(_WAITING):
        _place_rollout(groups, row)
    # A node gets its time anew: the learner's absence is not its fault.
    found = await ledger.fetch(f"SELECT {_LEASE} FROM leases WHERE state = 'open'")  # noqa: S608 - a constant
    leases = [_read_lease(row, now=now) for row in found]
    for lease in leases:
        _place_lease(groups, lease)
    for lease_id, node, group_id, indices in await ledger.fetch(
        "SELECT lease_id, node, l.group_id, samples FROM leases l JOIN groups g ON g.group_id = l.group_id"
        " WHERE g.state = 'live' AND l.state IN ('returned', 'expired')"
    ):
        for index in blob(indices):
            groups[number(group_id)].samples[index].abandoned.append((blob(lease_id), str(node)))
    return list(groups.values()), leases


def read_rollout(row: Row) -> StoredRollout:
    """A rollout from its :data:`ROLLOUT_COLUMNS`."""
    (lease_id, sample, group_id, node, version, step, root, seed, tokens, logprobs, finish, drawn, reward, exact,
     state, later) = row  # fmt: skip
    return StoredRollout(
        lease_id=blob(lease_id),
        sample=number(sample),
        group_id=number(group_id),
        node=str(node),
        version=number(version),
        step=number(step),
        root=blob(root),
        seed=int.from_bytes(blob(seed), "little"),
        tokens=blob(tokens),
        logprobs=blob(logprobs),
        finish=str(finish),
        drawn=bool(drawn),
        reward=None if reward is None else real(reward),
        exact_logprobs=None if exact is None else blob(exact),
        state=str(state),  # type: ignore[arg-type]
        later=tuple(
            Stretch(first_token, version, step, bytes.fromhex(root))
            for first_token, version, step, root in sorted(json.loads(str(later)))
        ),
    )


def _place_rollout(groups: dict[int, Group], row: Row) -> None:
    rollout = read_rollout(row)
    place = groups[rollout.group_id].samples[rollout.sample]
    place.state = "filled"
    place.lease_id = rollout.lease_id
    place.rollout = rollout


def _place_lease(groups: dict[int, Group], lease: LeaseRecord) -> None:
    group = groups.get(lease.group_id)
    if group is None:
        return
    for index in lease.indices:
        place = group.samples[index]
        if place.state == "open":
            place.state = "leased"
            place.lease_id = lease.lease_id


def _read_lease(row: Row, *, now: float) -> LeaseRecord:
    lease_id, node, group_id, samples, version, step, root, duration_s, state, digest, receipt, swap_mode = row
    return LeaseRecord(
        lease_id=blob(lease_id),
        node=str(node),
        group_id=number(group_id),
        indices=tuple(blob(samples)),
        version=number(version),
        step=number(step),
        root=blob(root),
        duration_s=real(duration_s),
        issued_at=now,
        state=str(state),  # type: ignore[arg-type]
        result_digest=None if digest is None else blob(digest),
        receipt=None if receipt is None else blob(receipt),
        swap_mode=str(swap_mode),  # type: ignore[arg-type]
    )


async def _count(ledger: Ledger) -> dict[str, int]:
    found = await ledger.fetch("SELECT state, count(*) FROM rollouts GROUP BY state")
    return {str(state): number(count) for state, count in found}


async def published_versions(ledger: Ledger) -> tuple[PublishedVersion, ...]:
    """Every version that ever went out, in order of their numbers."""
    found = await ledger.fetch(
        "SELECT version, step, root, manifest, state FROM versions WHERE state IN ('published', 'orphaned')"
        " ORDER BY version"
    )
    return tuple(
        PublishedVersion(
            head=Head(version=number(version), step=number(step), root=blob(root)),
            manifest=blob(manifest),
            is_orphaned=state == "orphaned",
        )
        for version, step, root, manifest, state in found
    )
