"""What a run of the curve came to, from its ledger alone: true rewards by step, and what became of whose work.

The rewards in the ledger may be claims, so every completion is decoded and scored again, with the run's own tokenizer
and environment. Who is honest is told by the caller; everybody else cheats.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from rollmesh_learner.work.model_text import ModelText
from rollmesh_protocol.environments import addition
from rollmesh_protocol.environments.interface import Item

TRAINED: Final = ("assigned", "consumed")
ROLLOUTS: Final = (
    "SELECT r.node, r.state, r.trained_step, r.tokens, r.reward, g.item FROM rollouts r JOIN groups g USING (group_id)"
)


def read_account(ledger: Path, *, model: Path, steps: int, seed: int, kinds: Mapping[str, str]) -> dict[str, object]:
    """The figures of one run. ``kinds`` names each cheating peer's way; all other peers of the ledger are honest.

    Curves have one value for each step, None for a step without such rollouts: ``curve`` is the true mean reward of
    honest nodes' rollouts, ``curve_consumed`` of all, ``curve_believed`` what the learner took the reward to be.
    """
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        rows = connection.execute(ROLLOUTS).fetchall()
        nodes = connection.execute("SELECT peer, standing FROM nodes").fetchall()
        offences = connection.execute("SELECT peer, code FROM offences").fetchall()
        audits = connection.execute("SELECT node, tokens FROM audits").fetchall()
        rollbacks = connection.execute("SELECT count(*) FROM rollbacks").fetchone()[0]
    rewards = true_rewards([(tokens, item) for *_, tokens, _, item in rows], model=model, seed=seed)
    honest: dict[int, list[float]] = defaultdict(list)
    consumed: dict[int, list[float]] = defaultdict(list)
    believed: dict[int, list[float]] = defaultdict(list)
    disagreements = 0
    for (node, state, step, _, reward, _), true in zip(rows, rewards, strict=True):
        if node not in kinds and reward is not None:
            disagreements += abs(reward - true) > 1e-9
        if state in TRAINED:
            consumed[step].append(true)
            believed[step].append(reward)
            if node not in kinds:
                honest[step].append(true)
    found = _Found(
        states=[(node, state) for node, state, *_ in rows],
        standings={peer: json.loads(text) for peer, text in nodes},
        offences=offences,
        audits=audits,
    )
    return {
        "curve": _means(honest, steps),
        "curve_consumed": _means(consumed, steps),
        "curve_believed": _means(believed, steps),
        "disagreements": disagreements,
        "rollbacks": rollbacks,
        "honest": _fates(found, {peer for peer, _ in (*found.states, *offences)} - kinds.keys()),
        "cheats": _fates(found, kinds.keys()),
        "by_kind": {
            kind: _fates(found, {peer for peer, its in kinds.items() if its == kind})
            for kind in sorted(set(kinds.values()))
        },
    }


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the ledger holds, by peer."""

    states: Sequence[tuple[str, str]]
    standings: Mapping[str, dict]
    offences: Sequence[tuple[str, str]]
    audits: Sequence[tuple[str, int]]


def true_rewards(answers: Sequence[tuple[bytes, str]], *, model: Path, seed: int) -> list[float]:
    """The reward of each (little-endian uint32 tokens, item as JSON), as an honest learner would give it."""
    environment = addition.make({}, seed=seed)
    texts = ModelText(model).texts([np.frombuffer(tokens, "<u4").tolist() for tokens, _ in answers])
    items = [Item.from_plain(json.loads(item)) for _, item in answers]
    return [environment.reward(item, text) for item, text in zip(items, texts, strict=True)]


def _means(by_step: Mapping[int, list[float]], steps: int) -> list[float | None]:
    return [round(fmean(by_step[step]), 6) if by_step.get(step) else None for step in range(steps)]


def _fates(found: _Found, peers: AbstractSet[str]) -> dict[str, object]:
    """Rollouts of ``peers`` by what became of them, and what was held against their nodes."""
    states = Counter(state for node, state in found.states if node in peers)
    standings = [standing for peer, standing in found.standings.items() if peer in peers]
    return {
        "identities": len(peers),
        "quarantined": sum(bool(standing["quarantined_for"]) for standing in standings),
        "accepted": sum(states.values()),
        "rejected": sum(standing["rejected"] for standing in standings),
        "consumed": sum(states[state] for state in TRAINED),
        "void": states["void"],
        "audited_tokens": sum(tokens for node, tokens in found.audits if node in peers),
        "offences": dict(Counter(code for peer, code in found.offences if peer in peers)),
    }
