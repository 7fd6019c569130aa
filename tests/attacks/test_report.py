"""The lab's JSON: what was not played is neither a success nor a miss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.attacks.crowd import ManyIdentities
from tests.attacks.place import Account
from tests.attacks.report import Row, judge, summary
from tests.attacks.sampling import Cooler

NOTHING = Account(
    accepted=0, trained=0, audits=0, audited_tokens=0, noticed_tokens=None, over_low=0, over_high=0, largest=0.0,
    offences=(),
)  # fmt: skip


def row(name: str, *, ok: bool | None, skipped: str = "") -> Row:
    return Row(
        attack=name, kind="protocol", generated_tokens=0, audited_tokens=0, noticed_tokens=None, bound_tokens=0,
        code="", accepted=0, share_trained=None, over_half=0, over_one=0, verdict="", ok=ok, skipped=skipped, note="",
    )  # fmt: skip


def test_an_attack_that_was_not_played_is_listed_with_its_reason() -> None:
    attack = ManyIdentities()
    attack.outcome.skipped = "it needs root"
    verdict, ok, code = judge(attack, NOTHING)
    assert (verdict, ok, code) == ("skipped: it needs root", None, "")
    rows = [row("a", ok=True), row("b", ok=None, skipped="it needs root")]
    told = summary(rows, failures=[])
    assert (told["ok"], told["played"], told["misses"]) == (True, 1, [])
    assert told["skipped"] == [{"attack": "b", "reason": "it needs root"}]


@pytest.mark.parametrize(
    ("noticed", "out", "is_good"), [(200, 350, True), (200, 700, True), (200, 730, False), (370, 380, False)]
)
def test_a_drift_is_noticed_within_the_bound_and_out_within_twice_that(noticed: int, out: int, is_good: bool) -> None:
    attack = Cooler()
    attack.outcome.codes.append("result.sampling")
    assert attack.bound_tokens == 360
    _, ok, code = judge(attack, replace(NOTHING, noticed_tokens=noticed, audited_tokens=out))
    assert (ok, code) == (is_good, "result.sampling")


def test_a_miss_is_a_miss_beside_what_was_skipped() -> None:
    rows = [row("a", ok=False), row("b", ok=None, skipped="it needs root")]
    told = summary(rows, failures=["the honest node"])
    assert (told["ok"], told["misses"]) == (False, ["a", "the honest node"])
    assert summary([replace(rows[0], ok=True)], failures=["the honest node"])["ok"] is False
