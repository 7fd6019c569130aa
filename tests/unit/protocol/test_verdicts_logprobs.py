"""Layer L4: honest noise passes, what trust.md lists asks for an audit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rollmesh_protocol.verdicts.logprobs import LogprobLimits, k3, mismatch

OWN = np.full(12, -1.5, np.float32)


def test_figures_by_hand() -> None:
    claimed = OWN - np.array([0.1] * 11 + [1.0], np.float32)
    found = mismatch(claimed, own=OWN)
    assert found.tokens == 12
    assert found.median == pytest.approx(np.expm1(0.1), rel=1e-5)
    assert found.kl == pytest.approx((11 * (np.exp(0.1) - 1.1) + np.e - 2) / 12, rel=1e-4)
    assert found.least_ratio == pytest.approx(np.exp(-1.0), rel=1e-5)


def test_honest_noise_passes() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, (1000, 12)).astype(np.float32)
    assert {mismatch(OWN + n, own=OWN).verdict for n in noise} == {"ok"}


@pytest.mark.parametrize(
    "claimed",
    [
        OWN + 0.3,  # inflated
        OWN - 0.3,  # deflated
        np.zeros(12, np.float32),  # "I was certain"
        OWN - np.array([0] * 11 + [9.3], np.float32),  # one token that they call impossible
        OWN - np.array([0] * 11 + [2.0], np.float32),  # the divergence of one token
        np.where(np.arange(12) == 3, np.float32(np.nan), OWN),
        np.where(np.arange(12) == 3, np.float32(-np.inf), OWN),
    ],
)
def test_the_rest_is_audited(claimed: np.ndarray) -> None:
    found = mismatch(claimed, own=OWN)
    assert found.verdict == "audit"
    assert all(np.isfinite(v) for v in (found.median, found.kl, found.least_ratio))


def test_impossible_for_us_is_audited() -> None:
    own = OWN - np.array([0] * 11 + [9.3], np.float32)
    found = mismatch(OWN, own=own, limits=LogprobLimits(kl=100.0))
    assert found.least_ratio < 1e-4
    assert found.verdict == "audit"


def test_a_short_answer_is_judged_by_its_divergence_alone() -> None:
    """The median of three tokens is noise; a lie that matters still shows."""
    own = OWN[:3]
    assert mismatch(own + 0.15, own=own).verdict == "ok"
    assert mismatch(OWN[:8] + 0.15, own=OWN[:8]).verdict == "audit"
    assert mismatch(own - 0.5, own=own).verdict == "audit"
    assert mismatch(np.zeros(3, np.float32), own=own).verdict == "audit"


def test_limits_are_the_operators() -> None:
    claimed = OWN + 0.3
    assert mismatch(claimed, own=OWN, limits=LogprobLimits(median=0.5, kl=1.0)).verdict == "ok"


@given(npst.arrays(np.float64, st.integers(1, 20), elements=st.floats(-50, 50)))
def test_k3_is_never_negative(difference: np.ndarray) -> None:
    assert (k3(difference) >= 0).all()


def test_k3_estimates_the_divergence() -> None:
    generator = np.random.default_rng(3)
    p, q = generator.dirichlet(np.ones(6)), generator.dirichlet(np.ones(6))
    drawn = generator.choice(6, size=200_000, p=p)
    estimate = k3(np.log(q[drawn]) - np.log(p[drawn])).mean()
    assert estimate == pytest.approx(float((p * np.log(p / q)).sum()), rel=0.02)


def test_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="shapes"):
        mismatch(OWN[:3], own=OWN)
    with pytest.raises(ValueError, match="shapes"):
        mismatch(OWN[:0], own=OWN[:0])
