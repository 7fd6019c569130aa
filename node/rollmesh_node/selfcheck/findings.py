"""What the figures of a selfcheck say is wrong with a node: pure, and by the learner's own verdicts.

Whether something is wrong is decided in :mod:`.figures`, as the learner does it. What it is, is named here from how
margins and log-probabilities lie, and from what another sampler would have drawn: a :class:`Guess` that makes the
claimed tokens exact again is what the engine did. The words are in ``advice``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rollmesh_node.journal import Entry
from rollmesh_node.selfcheck.figures import Checked, Figures
from rollmesh_protocol.verdicts.margins import Thresholds

Kind = Literal[
    "not_finite", "eos", "form", "temperature", "greedy", "truncation", "seed", "weights", "quantised", "stale",
    "logprobs", "shift", "tokens", "drift", "unstable", "late", "engine",
]  # fmt: skip

GUESS_EXACT: Final = 0.9
"""A guess must make so many tokens exact; honest engines have 0.97."""
SEED_EXACT: Final = 0.7
"""With right log-probabilities and fewer exact tokens than this, the noise is another: a wrong seed left 0.28."""
WEIGHTS_GAP: Final = 0.35
"""Median of the differences of log-probabilities, nats, from which weights are others and not just coarser: int4 in
groups of 32 had 0.64, int8 0.05, honest engines 0.03."""
COARSE_GAP: Final = 0.07
"""The same from which they are coarser than honest engines are: those came to 0.040 on prompts without a meaning."""
SHIFT_SPREAD: Final = 0.5
"""Differences that spread by less than this part of their mean are one constant."""
UNSTABLE_NATS: Final = 0.02
"""The same kernels on the same numbers give the same bits, or almost; honest engines differ by this from each other."""
FAR_SHARE: Final = 0.1
"""Of the rollouts, from which on log-probabilities that the learner would have audited are a fault and not a chance."""
LATE_SHARE: Final = 0.25
LATE: Final = frozenset({"lease.expired", "result.stale"})
FORM_KINDS: Final[Mapping[str, Kind]] = {
    "result.logprob": "not_finite",
    "result.finish": "eos",
    "result.length": "eos",
    "result.root": "stale",
}


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A sampler that would explain the tokens."""

    kind: Kind
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def words(self) -> str:
        """What it does."""
        if self.top_k:
            return f"top-k of about {self.top_k}"
        return f"top-p of about {self.top_p:g}" if self.top_p < 1 else f"about {self.temperature:g}"


TEMPERATURES: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)
GUESSES: Final = (
    *(Guess(kind="temperature", temperature=value) for value in TEMPERATURES),
    Guess(kind="greedy", temperature=1e-3),
    *(Guess(kind="truncation", top_k=value) for value in (20, 50)),
    *(Guess(kind="truncation", top_p=value) for value in (0.9, 0.95)),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, and the numbers or words that show it."""

    kind: Kind
    detail: str


def explain(
    checked: Sequence[Checked], figures: Figures, *, guesses: Mapping[Guess, float], thresholds: Thresholds
) -> Finding | None:
    """What is wrong with these rollouts, or None. ``guesses``: the share of tokens that each would make exact."""
    if figures.repeat_gap > UNSTABLE_NATS:
        return Finding(kind="unstable", detail=f"the same token twice, {figures.repeat_gap:.3g} nats apart")
    if figures.verdict == "pass" and not figures.is_drifting:
        return _explain_logprobs(figures)
    why = figures.why or (figures.drift.words if figures.drift is not None else "")
    share = f"{figures.exact_share:.1%} of {figures.tokens} tokens are exact; {why}"
    best = max(guesses, key=lambda guess: guesses[guess], default=None)
    if best is not None and guesses[best] >= max(GUESS_EXACT, (1 + figures.exact_share) / 2):
        return Finding(
            kind=best.kind, detail=f"{best.words}: {guesses[best]:.1%} of the tokens would be exact; {share}"
        )
    if figures.gap_median > COARSE_GAP:
        kind: Kind = "weights" if figures.gap_median > WEIGHTS_GAP else "quantised"
        return Finding(kind=kind, detail=f"log-probabilities off by {figures.gap_median:.3f} (median); {share}")
    if _only_at_ends(checked, thresholds):
        return Finding(kind="eos", detail=f"only the tokens that end a completion are wrong; {share}")
    if figures.exact_share < SEED_EXACT:
        return Finding(kind="seed", detail=share)
    return Finding(kind="tokens" if figures.verdict == "hard" else "drift", detail=share)


def explain_both(kept: Finding | None, fresh: Finding | None, *, is_fresh_checked: bool) -> list[Finding]:
    """What is wrong with the last results and with fresh ones, told once.

    Weights that are wrong in what was sent and right in a fresh engine were stale, or changed in memory.
    """
    if kept is not None and fresh is None and is_fresh_checked and kept.kind in {"weights", "quantised"}:
        kept = Finding(kind="stale", detail=f"a fresh engine is right, the last results were not: {kept.detail}")
    if kept is not None and fresh is not None and kept.kind == fresh.kind:
        return [fresh]
    return [finding for finding in (kept, fresh) if finding is not None]


def explain_form(refusals: Mapping[str, str]) -> list[Finding]:
    """What the checks that need no weights (layer L3) refuse: details by code."""
    return [
        Finding(kind=FORM_KINDS.get(code, "form"), detail=f"{code}: {detail}" if detail else code)
        for code, detail in refusals.items()
    ]


def explain_lateness(entries: Sequence[Entry]) -> list[Finding]:
    """Results that came too late for the learner, where they are more than a chance."""
    answered = [entry for entry in entries if entry.answer is not None]
    late = [entry for entry in answered if entry.answer is not None and entry.answer.code in LATE]
    if len(late) < 2 or len(late) <= LATE_SHARE * len(answered):
        return []
    slow = sum(entry.result.generate_s > entry.lease.duration_s / 2 for entry in late)
    detail = f"{len(late)} of the last {len(answered)} results"
    return [Finding(kind="late", detail=f"{detail}; {slow} took more than half of the time that their lease stood")]


def _explain_logprobs(figures: Figures) -> Finding | None:
    """The tokens are right: what of the log-probabilities beside them?"""
    if figures.far_rollouts <= FAR_SHARE * figures.rollouts:
        return None
    far = f"{figures.far_rollouts} of {figures.rollouts} rollouts, by {figures.gap_median:.3f} (median)"
    if abs(figures.shift) > COARSE_GAP and figures.shift_spread < SHIFT_SPREAD * abs(figures.shift):
        return Finding(kind="shift", detail=f"{far}, all by about {figures.shift:+.3f}")
    return Finding(kind="logprobs", detail=far)


def _only_at_ends(checked: Sequence[Checked], thresholds: Thresholds) -> bool:
    ends = sum(one.ends_with_stop and bool(one.margins[-1] > thresholds.low_margin) for one in checked)
    return ends > 1 and not any((one.margins[:-1] > thresholds.low_margin).any() for one in checked)
