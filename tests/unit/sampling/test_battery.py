"""The battery of the noise on some 10^5 draws, and that it can fail: each broken source is seen.

``make bench-sampler`` runs the same tests over 10^7 draws.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollmesh_protocol import sampling
from tests.support import noise_battery
from tests.support.noise_battery import FALSE_ALARMS, battery, broken, combined, reference

DRAWS = 300_000
CONTROL_DRAWS = 100_000


def test_the_source_is_the_sampler():
    table = reference(np.array([3, 1 << 40], dtype=np.uint64), np.array([0, 9], dtype=np.uint64), 12)
    assert table[1].tolist() == sampling.uniforms(1 << 40, 9, np.arange(12)).tolist()


def test_the_noise_passes():
    findings = battery(reference, draws=DRAWS, avalanche_inputs=1000)
    assert len(findings) > 35
    assert combined(findings) > FALSE_ALARMS, min(findings, key=lambda finding: finding.p)


@pytest.mark.parametrize("fault", broken())
def test_a_broken_source_is_seen(fault):
    findings = battery(broken()[fault], draws=CONTROL_DRAWS, avalanche_inputs=1000)
    assert combined(findings) < FALSE_ALARMS, min(findings, key=lambda finding: finding.p)


def test_p_values_are_uniform_for_a_perfect_source():
    """The rate of false alarms: numbers of numpy's own generator, which is no counter-based one, in the same tests."""
    p = []
    for seed in range(200):
        counts = np.bincount(np.random.default_rng(seed).integers(0, 64, 6400), minlength=64)
        p.append(noise_battery.chi_square_p(counts, np.full(64, 100.0)))
    assert 0.3 < np.mean(p) < 0.7
    assert sum(value < 0.05 for value in p) < 25
    assert noise_battery.chi_square_p(np.full(64, 100), np.full(64, 100.0)) < 1e-6  # too even is wrong, too


def test_p_values_are_the_published_ones():
    assert noise_battery._gammaincc(1 / 2, 3.841459 / 2) == pytest.approx(0.05, abs=1e-6)
    assert noise_battery._gammaincc(10 / 2, 29.588 / 2) == pytest.approx(0.001, abs=1e-6)
    assert noise_battery.normal_p(3.290527) == pytest.approx(0.001, abs=1e-8)
    assert noise_battery.poisson_p(3, 3.0) == 1.0
    assert noise_battery.poisson_p(0, 8.0) == pytest.approx(2 * math.exp(-8.0))


@pytest.mark.parametrize("gap", [0.0, 10.0, 19.0])
def test_24_bits_move_a_chance_by_no_more_than_2_to_the_minus_25(gap):
    assert abs(noise_battery.chance_of_the_lighter(gap) - 1 / (1 + math.exp(gap))) <= 2.0**-25


def test_beyond_the_lattice_a_token_is_never_drawn():
    """The tail that is cut: what softmax would give it is below 1.8e-9."""
    widest = sampling.G_MAX - sampling.G_MIN
    assert noise_battery.chance_of_the_lighter(widest - 1e-6) > 0
    assert noise_battery.chance_of_the_lighter(widest + 1e-6) == 0
    assert 1 / (1 + math.exp(widest)) < 1.8e-9
