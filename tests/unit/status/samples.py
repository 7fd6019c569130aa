"""Statuses for the tests of what a terminal shows."""

from __future__ import annotations

from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Head, Standing
from rollmesh_protocol.status import (
    LengthStatus,
    NodeStatus,
    PeerStatus,
    RunStatus,
    SpreadStatus,
    TrustStatus,
)

PEERS = [Identity(bytes([number]) * 32).peer for number in range(1, 8)]


def standing(state="full", *, accepted=0, rejected=0, reason=""):
    return Standing(state=state, accepted=accepted, rejected=rejected, audited=0, reason=reason)


def peer(number: int, **fields) -> PeerStatus:
    values = {
        "peer": PEERS[number],
        "name": f"pc-{number}",
        "role": "worker",
        "engine": "transformers bfloat16 on cpu",
        "connected": True,
        "path": "in",
        "version": 12,
        "tokens_per_s": 100.0 * number,
        "standing": standing(accepted=10 * number),
        "leased_samples": 8,
        "last_accepted_s": 2.0 * number,
        "last_seen_s": 0.5,
        "waiting_for": "",
        "withheld": "",
    }
    return PeerStatus(**(values | fields))


def spread_status(version: int, **fields) -> SpreadStatus:
    values = {
        "version": version,
        "head_bytes": 3_314_800,
        "age_s": 9.0,
        "online": 3,
        "holding": 3,
        "most_s": 3.1,
        "last_s": 4.2,
        "bytes_from_learner": 4_000_000,
        "slowest": ("attic", "node-b"),
    }
    return SpreadStatus(**(values | fields))


def trust_status(**fields) -> TrustStatus:
    values = {
        "audits_waiting": 4,
        "audits_most": 128,
        "audited_tokens": 5_100,
        "work_tokens": 51_000,
        "steady_audited_tokens": 990,
        "steady_work_tokens": 33_000,
        "consumed_bad": 0,
        "consumed_bad_steps": (),
        "reaudits_waiting": 0,
        "over_cap": 0,
        "lengths": (
            LengthStatus(tokens=4, consumed=100, dropped=0),
            LengthStatus(tokens=8, consumed=300, dropped=25),
        ),
    }
    return TrustStatus(**(values | fields))


def run_status(*peers: PeerStatus, **fields) -> RunStatus:
    values = {
        "run": "run-1",
        "name": "smollm2-arithmetic",
        "learner": PEERS[0],
        "software": "rollmesh 0.1.0",
        "state": "training step 12",
        "head": Head(version=12, step=12, root=b"\x9a" * 32),
        "head_bytes": 3_314_800,
        "model_bytes": 269_030_016,
        "spread": (spread_status(12, holding=2, last_s=None), spread_status(11)),
        "step": 12,
        "steps": 40,
        "mean_reward": 0.5512,
        "groups_leased": 4,
        "groups_ready": 3,
        "rollouts_accepted": 1768,
        "rollouts_rejected": 2,
        "audits_done": 31,
        "audits_failed": 0,
        "trust": trust_status(),
        "bubble_fraction": 0.0123,
        "uptime_s": 4337.0,
        "children": ("trainer: step 12, 4.1 s", "auditor: idle"),
        "peers": peers,
        "page": 0,
        "pages": 1,
    }
    return RunStatus(**(values | fields))


def node_status(**fields) -> NodeStatus:
    values = {
        "peer": PEERS[1],
        "name": "attic",
        "software": "rollmesh 0.1.0",
        "run": "run-1",
        "learner": PEERS[0],
        "learner_connected": True,
        "head": Head(version=12, step=12, root=b"\x9a" * 32),
        "version_held": 11,
        "root_held": b"\x11" * 32,
        "engine": "transformers, running, pid 12",
        "tokens_per_s": 143.2,
        "leases_open": 2,
        "standing": standing(accepted=996),
        "accepted": 996,
        "rejected": 1,
        "last_accepted_s": 2.2,
        "last_refusal": "result.stale: the result came too late for its weights",
        "bytes_from_learner": 3_200_000,
        "bytes_from_peers": 12_800_000,
        "chunks_from_learner": 13,
        "chunks_from_peers": 49,
        "bytes_served": 9_100_000,
        "neighbours": 3,
        "waiting_for": "",
        "uptime_s": 4330.0,
    }
    return NodeStatus(**(values | fields))
