"""The conversation with the child that recomputes for a selfcheck: pieces of rollouts in, figures of their tokens out.

Each piece is recomputed twice, for a machine that does not repeat itself is broken; and where margins are odd, the
child is asked which other sampler would have drawn these tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

import numpy as np

from rollmesh_node.selfcheck.figures import Checked, is_odd, joined
from rollmesh_node.selfcheck.findings import GUESSES, Guess
from rollmesh_node.selfcheck.pieces import Piece
from rollmesh_peer.children.launch import ChildSpec, python_argv
from rollmesh_peer.children.process import Child
from rollmesh_protocol.errors import ChildFailed
from rollmesh_protocol.verdicts.judging import Judging

GUESS_PIECES: Final = 16
"""Pieces that guesses are tried on: each guess is a forward pass over them."""
RECHECK_S: Final = 900.0
AT_ONCE: Final = 64
"""Pieces in one call to the child."""
NICE: Final = 10
"""The PC's owner, and the node if it runs, go first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recomputed:
    """Work of one kind, and which samplers would explain it: exact tokens by guess, of ``asked`` tokens."""

    pieces: list[tuple[Piece, Checked]] = field(default_factory=list)
    exact: Counter[Guess] = field(default_factory=Counter)
    asked: Counter[Guess] = field(default_factory=Counter)

    @property
    def rollouts(self) -> list[Checked]:
        """In the order in which they were made, each of all its pieces that could be recomputed."""
        ordered = sorted(self.pieces, key=lambda one: (one[0].number, one[0].first))
        grouped = groupby(ordered, key=lambda one: one[0].number)
        return [joined([checked for _, checked in pieces]) for _, pieces in grouped]

    @property
    def guesses(self) -> Mapping[Guess, float]:
        """The share of tokens that each would make exact."""
        return {guess: self.exact[guess] / tokens for guess, tokens in self.asked.items()}


def recheck_spec(engine: ChildSpec) -> ChildSpec:
    """The child that recomputes, in the environment of the engine."""
    return replace(engine, name="recheck", argv=python_argv("rollmesh_node.engine.recheck"), nice=NICE)


async def recheck(child: Child, pieces: Sequence[Piece], *, into: Recomputed, judging: Judging) -> None:
    """Recompute pieces of the root that is loaded, twice; and where they are odd, what would explain them."""
    checked: list[Checked] = []
    for start in range(0, len(pieces), AT_ONCE):
        some = pieces[start : start + AT_ONCE]
        first, again = await _recomputed(child, some), await _recomputed(child, some)
        checked += [
            Checked(
                claimed=piece.logprobs, exact=one[1], again=two[1], margins=one[0],
                ends_with_stop=piece.ends_with_stop,
            )
            for piece, one, two in zip(some, first, again, strict=True)
        ]  # fmt: skip
    into.pieces.extend(zip(pieces, checked, strict=True))
    if not checked or not is_odd(checked, judging):
        return
    for guess in GUESSES:
        margins = [one[0] for one in await _recomputed(child, pieces[:GUESS_PIECES], guess=guess)]
        into.exact[guess] += sum(int((one == 0).sum()) for one in margins)
        into.asked[guess] += sum(one.size for one in margins)


async def _recomputed(
    child: Child, pieces: Sequence[Piece], *, guess: Guess | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Margins and log-probabilities, float32 [tokens], of each piece; under a guess if one is given."""
    body: dict[str, object] = {
        "rollouts": [
            {
                "prompt": piece.prompt,
                "tokens": piece.tokens.astype("<u4").tobytes(),
                "seed": piece.seed,
                "first": piece.first,
            }
            for piece in pieces
        ]
    }
    if guess is not None:
        body |= {"temperature": guess.temperature, "top_k": guess.top_k, "top_p": guess.top_p}
    answer = await child.call("recheck", body, deadline_s=RECHECK_S)
    outcomes = answer.get("rollouts")
    if not isinstance(outcomes, list | tuple) or len(outcomes) != len(pieces):
        raise ChildFailed("the check answered for another number of rollouts")
    found = [tuple(np.frombuffer(outcome[name], "<f4") for name in ("margins", "logprobs")) for outcome in outcomes]
    return [(margins, logprobs) for margins, logprobs in found]
