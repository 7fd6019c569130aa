"""How a run judges, over the wire: what is read is what was written, and what no run can mean is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollmesh_protocol import codec
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.messages import DriftCheck, LogprobChecks, MarginChecks, RunCard
from rollmesh_protocol.verdicts.drift import MOST_EXPONENT, DriftTest
from rollmesh_protocol.verdicts.judging import Judging
from rollmesh_protocol.verdicts.logprobs import LogprobLimits
from rollmesh_protocol.verdicts.margins import Thresholds
from tests.unit.protocol.examples import CARD

CALIBRATED = Judging(
    thresholds=Thresholds(low_margin=0.66, high_margin=1.006, any_margin=2.957, high_in_one=4, window_tokens=500),
    drift=DriftTest(clip=0.344, reference=0.00347, exponent=5.53),
    logprobs=LogprobLimits(median=0.2, kl=0.3, least_ratio=1e-5),
)


def decoded(card: dict[str, Any]) -> RunCard:
    return RunCard.decode(codec.pack(card), limit=1 << 20)


@pytest.mark.parametrize("judging", [CALIBRATED, Judging(), Judging(drift=DriftTest(clip=1, reference=1, exponent=0))])
def test_a_node_judges_as_its_card_says(judging: Judging) -> None:
    card = CARD.model_copy(update={"checks": judging.as_checks})
    assert Judging.read(decoded(card.model_dump()).checks) == judging


def test_a_card_that_says_nothing_means_the_defaults() -> None:
    card = CARD.model_dump()
    assert Judging.read(decoded({**card, "checks": None}).checks) == Judging()
    del card["checks"]
    assert Judging.read(decoded(card).checks) == Judging(), "so were cards before there were checks"


@pytest.mark.parametrize(
    ("record", "kind"), [(MarginChecks, Thresholds), (DriftCheck, DriftTest), (LogprobChecks, LogprobLimits)]
)
def test_every_limit_travels(record: type, kind: type) -> None:
    assert set(record.model_fields) == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("margins", "low_margin", 0.0),
        ("margins", "any_margin", -3.0),
        ("margins", "high_margin", 1e9),
        ("margins", "high_margin", float("nan")),
        ("margins", "high_in_one", 0),
        ("margins", "high_in_one", 2.5),
        ("margins", "window_tokens", 1 << 40),
        ("margins", "low_share", 1.5),
        ("margins", "secret", 1.0),
        ("drift", "clip", float("inf")),
        ("drift", "reference", 0.0),
        ("drift", "exponent", -1.0),
        ("drift", "exponent", 1e6),
        ("drift", "alarm", 0.0),
        ("drift", "alarm", "17"),
        ("logprobs", "median", 0.0),
        ("logprobs", "kl", None),
        ("logprobs", "least_ratio", 2.0),
    ],
)
def test_limits_that_no_run_can_have_are_refused(part: str, field: str, value: object) -> None:
    card = CARD.model_dump()
    card["checks"][part][field] = value
    with pytest.raises(Refused) as caught:
        RunCard.decode(codec.pack(card), limit=1 << 20)
    assert caught.value.code == "request.invalid"


@pytest.mark.parametrize("part", ["margins", "drift", "logprobs"])
def test_half_a_check_is_none(part: str) -> None:
    card = CARD.model_dump()
    del card["checks"][part]
    with pytest.raises(Refused, match=part):
        decoded(card)


def test_whatever_a_calibration_finds_fits() -> None:
    steep = Judging(drift=DriftTest(clip=0.05, reference=1e-4, exponent=2 * MOST_EXPONENT))
    assert Judging.read(steep.as_checks) == steep


def test_the_rest_of_a_card_decides_whether_it_is_the_same_run() -> None:
    other = CARD.model_copy(update={"checks": CALIBRATED.as_checks})
    assert other != CARD and other.is_same_run(CARD) and CARD.is_same_run(other)
    assert not CARD.is_same_run(CARD.model_copy(update={"vocabulary": 11}))


def test_where_the_limits_come_from_is_told() -> None:
    assert CALIBRATED.origin == "this run's calibration"
    assert Judging().origin == "defaults: the run has no calibration"
    assert "set for this run" in Judging(thresholds=Thresholds(low_margin=0.6)).origin
