"""Rollouts to recompute, cut where their weights change: each piece under its own root, and one outcome again.

A piece is recomputed as its engine drew it: prompt and kept tokens are prefilled under the piece's own weights, and the
noise is that of the tokens' places in the whole completion. Invariants: the pieces of a rollout are all of its tokens,
in order, so that figures and verdicts are of the whole rollout; a rollout that lacks the weights of one piece is not
recomputed at all. Pure: the child that computes is the auditor's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from rollmesh_learner.audit.cases import Case
from rollmesh_peer.children.frames import Body
from rollmesh_protocol.errors import ChildFailed

TOKEN_BYTES: Final = 4
"""Of a token id, of a log-probability and of a margin alike."""


@dataclass(frozen=True)
class Piece:
    """Some tokens of one case, all drawn under ``root``."""

    case: Case
    root: bytes
    version: int
    first: int
    end: int

    def body(self, key: int) -> Body:
        """What the auditor's child is asked (:mod:`.process`)."""
        rollout = self.case.rollout
        span = slice(TOKEN_BYTES * self.first, TOKEN_BYTES * self.end)
        return {
            "key": key,
            "prompt": self.case.prompt + rollout.tokens[: span.start],
            "tokens": rollout.tokens[span],
            "logprobs": rollout.logprobs[span],
            "seed": rollout.seed,
            "first": self.first,
        }


def roots_of(case: Case) -> frozenset[bytes]:
    """All weights that recomputing a case takes."""
    return frozenset(stretch.root for stretch in case.rollout.stretches)


def together(cases: Sequence[Case], *, most: int) -> list[Case]:
    """Up to ``most`` of ``cases`` that go well together with the first: few weights are loaded, each of them once.

    Those that share the first one's oldest weights say which roots are loaded; all that need no others come along.
    """
    oldest = cases[0].rollout.root
    loaded = frozenset[bytes]().union(*(roots_of(case) for case in cases if case.rollout.root == oldest))
    return [case for case in cases if roots_of(case) <= loaded][:most]


def are_kept(case: Case, image_of: Callable[[bytes], object | None]) -> bool:
    """True when the weights of every piece are at hand."""
    return all(image_of(root) is not None for root in roots_of(case))


def by_root(cases: Sequence[Case]) -> dict[bytes, list[Piece]]:
    """The pieces of all ``cases`` by their weights, the oldest version first."""
    pieces = [piece for case in cases for piece in _cut(case)]
    pieces.sort(key=lambda piece: piece.version)
    found: dict[bytes, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.root, []).append(piece)
    return found


def joined(outcomes: Sequence[Body]) -> Body:
    """One outcome from those of a rollout's pieces, in order. ``ChildFailed``: they are not what was asked for."""
    parts = {name: [outcome[name] for outcome in outcomes] for name in ("margins", "exact_logprobs")}
    whole: Body = {}
    for name, values in parts.items():
        if not all(isinstance(value, bytes) for value in values):
            raise ChildFailed(f"the auditor's {name} do not fit the rollout")
        whole[name] = b"".join(value for value in values if isinstance(value, bytes))
    return whole


def _cut(case: Case) -> list[Piece]:
    stretches = case.rollout.stretches
    firsts = [stretch.first_token for stretch in stretches]
    spans = pairwise([*firsts, case.rollout.num_tokens])
    return [
        Piece(case, stretch.root, stretch.version, first, end)
        for stretch, (first, end) in zip(stretches, spans, strict=True)
    ]
