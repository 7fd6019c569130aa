"""A selfcheck's report, as one screen of words or as one JSON object. Pure.

The sentence of the verdict comes last but for the advice, where a person looks first; what could not be checked is
never left out.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Final

from rollmesh_node.selfcheck.advice import ADVICE
from rollmesh_node.selfcheck.figures import Figures
from rollmesh_node.selfcheck.findings import Finding
from rollmesh_peer.status.words import clean, count
from rollmesh_protocol.errors import CODES
from rollmesh_protocol.messages import Standing
from rollmesh_protocol.verdicts.judging import Judging
from rollmesh_protocol.verdicts.margins import Thresholds

STATUS: Final = {"fine": 0, "wrong": 1, "unchecked": 2}
"""Exit status by verdict."""
WIDTH: Final = 100
_INDENT: Final = " " * 13


@dataclass(kw_only=True)
class Report:
    """What a selfcheck found. Figures are None of what could not be recomputed; ``notes`` say why."""

    judging: Judging = field(default_factory=Judging)
    run: str = ""
    results: int = 0
    rollouts: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """What the learner, or this node itself, said of the last results, by code."""
    standing: Standing | None = None
    versions: tuple[int, ...] = ()
    device: str = ""
    kept: Figures | None = None
    fresh: Figures | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``fine``, ``wrong`` or ``unchecked``."""
        if self.findings:
            return "wrong"
        return "fine" if self.kept or self.fresh else "unchecked"


def as_json(report: Report) -> str:
    """One object: the report's fields, the verdict, and the words beside each finding."""
    told = asdict(report) | {
        "verdict": report.verdict,
        "limits": report.judging.origin,
        "refusals": dict(report.refusals),
        "standing": report.standing.model_dump() if report.standing is not None else None,
        "findings": [asdict(finding) | asdict(ADVICE[finding.kind]) for finding in report.findings],
    }
    return json.dumps(told, ensure_ascii=False)


def as_text(report: Report) -> str:
    """The screen."""
    if not report.run:
        return "\n".join(["selfcheck: there is nothing to check", *_notes(report)])
    lines = [
        f"selfcheck: run {clean(report.run)}, {count(report.results)} results of {count(report.rollouts)} rollouts"
    ]
    for name, figures in (("last work", report.kept), ("fresh work", report.fresh)):
        if figures is not None:
            lines += ["", *_figures(name, figures, report.judging.thresholds)]
    if report.versions:
        versions = ", ".join(str(version) for version in sorted(report.versions))
        lines += _line("weights", f"version {versions}, recomputed on {report.device}")
        lines += _line("limits", report.judging.origin)
    lines += ["", *_learner(report)]
    lines += [*_notes(report), "", *_verdict(report)]
    for finding in report.findings:
        advice = ADVICE[finding.kind]
        lines += ["", *_line("wrong", f"{advice.what} ({clean(finding.detail, limit=400)})")]
        lines += [*_line("likely", advice.likely), *_line("do", advice.do)]
    return "\n".join(lines)


def _notes(report: Report) -> list[str]:
    return [line for note in report.notes for line in _line("note", clean(note, limit=400))]


def _figures(name: str, figures: Figures, thresholds: Thresholds) -> list[str]:
    few = " (too few for a verdict on shares)" if figures.tokens < thresholds.window_tokens else ""
    return [
        *_line(name, f"{count(figures.rollouts)} rollouts, {count(figures.tokens)} tokens recomputed{few}"),
        *_line(
            "margins",
            f"{figures.exact_share:.1%} exact, largest {figures.largest_margin:.2f}, "
            f"above {thresholds.low_margin:.3g}: {figures.low_share:.2%}, "
            f"above {thresholds.high_margin:.3g}: {figures.high_share:.2%}",
        ),
        *(_line("drift", figures.drift.figures) if figures.drift is not None else ()),
        *_line(
            "log-probs",
            f"off by {figures.gap_median:.3f} (median), {figures.gap_p99:.2f} (99 in 100), "
            f"{figures.gap_largest:.2f} (largest)",
        ),
    ]


def _learner(report: Report) -> list[str]:
    standing = report.standing
    if standing is None:
        lines = _line("learner", "has said nothing of this node yet")
    else:
        why = f": {clean(standing.reason)}" if standing.reason else ""
        counts = f"{count(standing.accepted)} accepted, {count(standing.rejected)} rejected"
        lines = _line("learner", f"standing {standing.state}{why}; {counts}")
    for code, times in report.refusals.most_common(4):
        known = CODES.get(code)
        lines += _line("refused", f"{times} x {clean(code)}{f': {known.meaning}' if known else ''}")
    return lines


def _verdict(report: Report) -> list[str]:
    if report.verdict == "unchecked":
        return _line("verdict", "nothing could be recomputed, so nothing is said about this node's work")
    if report.verdict == "wrong":
        return _line("verdict", "something is wrong: the learner would refuse this work or take it from others")
    if report.refusals or (report.standing is not None and report.standing.state == "quarantined"):
        return _line(
            "verdict",
            "what this node makes is fine by the learner's checks, though the learner has refused some of it: if that "
            "was before a repair, tell the operator; if it goes on, send the operator this page",
        )
    return _line("verdict", "fine: what this node makes passes the learner's checks")


def _line(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<11}", subsequent_indent=_INDENT)
