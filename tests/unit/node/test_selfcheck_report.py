"""The screen of a selfcheck: which limits were used is told, and how the work lies to them."""

from __future__ import annotations

import json

import numpy as np

from rollmesh_node.selfcheck.figures import Figures, figures_of
from rollmesh_node.selfcheck.findings import explain
from rollmesh_node.selfcheck.pieces import Piece
from rollmesh_node.selfcheck.rechecking import Recomputed
from rollmesh_node.selfcheck.report import Report, as_json, as_text
from rollmesh_protocol.verdicts.judging import Judging
from tests.unit.node.test_findings import CALIBRATED, Checked, rollouts


def report_of(checked: list[Checked], judging: Judging) -> Report:
    figures = figures_of(checked, judging)
    assert figures is not None
    finding = explain(checked, figures, guesses={}, thresholds=judging.thresholds)
    return Report(
        judging=judging, run="sums", results=3, rollouts=len(checked), versions=(4,), device="cpu", kept=figures,
        findings=[finding] if finding else [],
    )  # fmt: skip


def test_the_limits_are_told() -> None:
    honest = rollouts(50, margin=0.04, every=20)
    lines = as_text(report_of(honest, Judging())).splitlines()
    assert "  limits     defaults: the run has no calibration" in lines
    assert not any(line.startswith("  drift") for line in lines)
    lines = as_text(report_of(honest, CALIBRATED)).splitlines()
    assert "  limits     this run's calibration" in lines
    assert "  drift      0.002 nats a token, of honest nodes at most 0.002; score 0.0 of 17.5" in lines
    assert max(map(len, lines)) <= 100


def test_a_drift_is_told_in_words_and_to_programs() -> None:
    report = report_of(rollouts(50, margin=0.2, every=10), CALIBRATED)
    text = " ".join(as_text(report).split())
    assert "verdict something is wrong" in text and "top-p" in text and "overclocked" in text
    assert "lie on average 0.02 nats from what the run's weights choose" in text
    told = json.loads(as_json(report))
    assert told["limits"] == "this run's calibration" and told["judging"]["drift"]["reference"] == 0.003
    assert told["kept"]["drift"]["alarms"] > 0 and told["findings"][0]["kind"] == "drift"


def test_pieces_become_the_rollouts_that_the_learner_judges() -> None:
    """Three margins above high_margin in two pieces of one rollout are a hard failure, as they are for the auditor."""
    done = Recomputed()
    for number, first, margin in ((1, 0, 0.0), (0, 128, 1.2), (0, 0, 1.1)):
        (checked,) = rollouts(1, tokens=128, margin=margin, every=64)
        piece = Piece(
            root=bytes(32), prompt=b"", tokens=np.zeros(128, np.uint32), logprobs=checked.claimed, seed=0, first=first,
            ends_with_stop=True, number=number,
        )  # fmt: skip
        done.pieces.append((piece, checked))
    first, second = done.rollouts
    assert len(first.margins) == 256
    assert [float(first.margins[t]) for t in (0, 64, 128, 192)] == [np.float32(m) for m in (1.1, 1.1, 1.2, 1.2)]
    assert len(second.margins) == 128
    figures = figures_of(done.rollouts, Judging())
    assert isinstance(figures, Figures) and figures.rollouts == 2 and figures.verdict == "hard"
