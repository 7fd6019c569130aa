"""What figures are taken to mean: the learner's verdicts, and a name for each way of being wrong."""

from __future__ import annotations

import typing

import numpy as np
import pytest

from rollmesh_node.journal import Answer, Entry
from rollmesh_node.selfcheck.advice import ADVICE
from rollmesh_node.selfcheck.figures import Checked, figures_of, is_odd
from rollmesh_node.selfcheck.findings import (
    GUESSES,
    Finding,
    Kind,
    explain,
    explain_both,
    explain_form,
    explain_lateness,
)
from rollmesh_protocol.verdicts.drift import DriftTest
from rollmesh_protocol.verdicts.judging import Judging
from tests.unit.node.leases import make_lease
from tests.unit.node.test_journal import result_of

DEFAULTS = Judging()
CALIBRATED = Judging(drift=DriftTest(clip=0.3, reference=0.003, exponent=5.0))


def rollouts(
    count: int = 20, *, tokens: int = 20, margin: float = 0.0, every: int = 1, gap=0.0, noise: float = 0.02, again=0.0
) -> list[Checked]:
    """Rollouts with ``margin`` at every so many tokens, and log-probabilities off by ``gap`` and some noise."""
    generator = np.random.default_rng(1)
    found = []
    for _ in range(count):
        exact = -generator.random(tokens).astype(np.float32) * 3
        margins = np.zeros(tokens, np.float32)
        margins[::every] = margin
        claimed = exact + np.float32(gap) + generator.normal(0, noise, tokens).astype(np.float32)
        found.append(
            Checked(claimed=claimed, exact=exact, again=exact + np.float32(again), margins=margins, ends_with_stop=True)
        )
    return found


def explained(checked: list[Checked], guesses=None, *, judging: Judging = DEFAULTS) -> Finding | None:
    figures = figures_of(checked, judging)
    assert figures is not None
    return explain(checked, figures, guesses=guesses or {}, thresholds=judging.thresholds)


def kind_of(checked: list[Checked], guesses=None, *, judging: Judging = DEFAULTS) -> str:
    finding = explained(checked, guesses, judging=judging)
    return finding.kind if finding is not None else "fine"


def test_honest_noise_is_fine() -> None:
    checked = rollouts(margin=0.3, every=40, noise=0.05)
    assert kind_of(checked) == "fine" and not is_odd(checked, DEFAULTS)
    assert figures_of([], DEFAULTS) is None


@pytest.mark.parametrize(
    ("checked", "kind"),
    [
        (rollouts(margin=5.0, every=2), "seed"),
        (rollouts(margin=5.0, every=2, noise=1.0), "weights"),
        (rollouts(margin=0.7, every=20, noise=0.12), "quantised"),
        (rollouts(margin=5.0, every=20), "tokens"),
        (rollouts(margin=0.7, every=20), "drift"),
        (rollouts(gap=-0.4), "shift"),
        (rollouts(noise=0.5), "logprobs"),
        (rollouts(again=0.1), "unstable"),
        (rollouts(margin=5.0, every=2, again=0.1), "unstable"),
    ],
)
def test_each_way_of_being_wrong_has_a_name(checked: list[Checked], kind: str) -> None:
    assert kind_of(checked) == kind


def test_a_guess_is_believed_when_it_explains_nearly_everything() -> None:
    checked = rollouts(margin=2.0, every=4, noise=1.0)
    right = dict.fromkeys(GUESSES, 0.6) | {GUESSES[4]: 0.97}
    assert kind_of(checked, right) == "temperature"
    assert "0.7" in str(explained(checked, right))
    assert kind_of(checked, dict.fromkeys(GUESSES, 0.85)) == "weights"


def test_ends_that_were_forced_are_told_from_edited_tokens() -> None:
    checked = rollouts()
    for one in checked[:8]:
        one.margins[-1] = 6.0
    assert kind_of(checked) == "eos"
    checked[9].margins[3] = 6.0
    assert kind_of(checked) == "tokens"


def test_a_drift_below_all_margins_is_found_where_the_run_looks_for_one() -> None:
    checked = rollouts(50, margin=0.2, every=10)
    assert kind_of(checked) == "fine" and not is_odd(checked, DEFAULTS)
    finding = explained(checked, judging=CALIBRATED)
    assert finding is not None and finding.kind == "drift" and is_odd(checked, CALIBRATED)
    assert "on average 0.02 nats" in finding.detail and "honest nodes 0.002 at most" in finding.detail
    assert "after some 206 audited tokens the learner sees a drift" in finding.detail


def test_a_drift_is_named_by_what_explains_it() -> None:
    checked = rollouts(50, margin=0.2, every=10)
    warm = dict.fromkeys(GUESSES, 0.9) | {GUESSES[6]: 0.96}
    assert kind_of(checked, warm, judging=CALIBRATED) == "temperature"
    assert kind_of(rollouts(50, margin=0.2, every=10, noise=0.12), judging=CALIBRATED) == "quantised"
    assert kind_of(rollouts(50, margin=5.0, every=10), judging=CALIBRATED) == "tokens", "other rules come first"


def test_honest_work_has_no_drift() -> None:
    assert kind_of(rollouts(50, margin=0.08, every=40), judging=CALIBRATED) == "fine"
    assert kind_of(rollouts(gap=-0.4, margin=0.08, every=40), judging=CALIBRATED) == "shift"


def test_few_tokens_get_no_verdict_on_shares() -> None:
    assert kind_of(rollouts(4, margin=0.7, every=20)) == "fine"


def test_what_is_wrong_in_both_is_told_once_and_mended_weights_were_stale() -> None:
    weights, seed = Finding(kind="weights", detail="old"), Finding(kind="seed", detail="")
    fresh = Finding(kind="weights", detail="new")
    assert explain_both(weights, fresh, is_fresh_checked=True) == [fresh]
    assert [one.kind for one in explain_both(weights, None, is_fresh_checked=True)] == ["stale"]
    assert explain_both(weights, None, is_fresh_checked=False) == [weights]
    assert explain_both(seed, fresh, is_fresh_checked=True) == [seed, fresh]
    assert explain_both(None, None, is_fresh_checked=True) == []


def test_forms_are_named() -> None:
    refusals = {"result.logprob": "", "result.finish": "tokens after the end", "result.schema": "bytes"}
    assert [finding.kind for finding in explain_form(refusals)] == ["not_finite", "eos", "form"]


def entry(code: str | None) -> Entry:
    lease = make_lease()
    answer = Answer(by="learner", accepted=0, code=code, detail="")
    return Entry(lease=lease, result=result_of(lease), answer=answer, at=0.0)


def test_lateness_is_a_fault_when_it_is_more_than_a_chance() -> None:
    good = [entry(None) for _ in range(6)]
    assert explain_lateness([*good, entry("lease.expired")]) == []
    (finding,) = explain_lateness([*good, *(entry("lease.expired") for _ in range(3))])
    assert finding.kind == "late" and "3 of the last 9" in finding.detail
    assert explain_lateness([*good, *(entry("result.sampling") for _ in range(3))]) == []


def test_there_are_words_for_everything() -> None:
    assert set(ADVICE) == set(typing.get_args(Kind))
    for advice in ADVICE.values():
        assert not any(sentence.endswith(".") for sentence in (advice.what, advice.likely, advice.do))
