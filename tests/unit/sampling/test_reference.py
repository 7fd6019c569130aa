"""The numpy reference: Philox against published answers, the noise against golden vectors, its edges."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rollmesh_protocol import sampling
from tests.unit.sampling.make_vectors import VECTORS, logits, make

GOLDEN = json.loads(VECTORS.read_text())
ONES = 0xFFFF_FFFF
# kat_vectors of the Random123 distribution, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert sampling.philox4x32(counter, key).tolist() == list(answer)


def test_philox_broadcasts_and_does_not_depend_on_its_blocks():
    counters = np.arange(2 * sampling.PHILOX_BLOCK + 3)
    words = sampling.philox4x32((counters, 5, 0, 0), (1, 2))
    assert words.shape == (len(counters), 4)
    for at in (0, sampling.PHILOX_BLOCK - 1, sampling.PHILOX_BLOCK, len(counters) - 1):
        assert words[at].tolist() == sampling.philox4x32((at, 5, 0, 0), (1, 2)).tolist()


def test_golden_vectors():
    assert make() == GOLDEN


def test_golden_vectors_of_the_ends_of_the_lattice():
    k_least, k_most = GOLDEN["extremes"]["k_least"], GOLDEN["extremes"]["k_most"]
    assert sampling.uniforms(*k_least) == 0
    assert sampling.uniforms(*k_most) == 2**24 - 1
    assert sampling.noise(*k_least) == sampling.G_MAX == pytest.approx(17.328679, abs=1e-6)
    assert sampling.noise(*k_most) == sampling.G_MIN == pytest.approx(-2.852363, abs=1e-6)


def test_noise_is_finite_and_falls_with_k():
    k = np.unique(np.concatenate([np.arange(1000), np.arange(2**24 - 1000, 2**24), np.arange(0, 2**24, 9973)]))
    noise = sampling.gumbel(k)
    assert np.isfinite(noise).all()
    assert (np.diff(noise) < 0).all()


def test_any_element_can_be_computed_alone():
    together = sampling.noise(99, 3, np.arange(300).reshape(3, 100))
    assert together.shape == (3, 100)
    assert [sampling.noise(99, 3, token).item() for token in (0, 1, 150, 299)] == together.ravel()[
        [0, 1, 150, 299]
    ].tolist()


def test_seed_and_position_are_used_whole():
    base = sampling.uniforms(0, 0, np.arange(64)).tolist()
    for seed, position in ((1, 0), (1 << 32, 0), (1 << 63, 0), (0, 1), (0, 1 << 31)):
        assert sampling.uniforms(seed, position, np.arange(64)).tolist() != base


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (1 << 64, 0), (0, -1), (0, 1 << 32)])
def test_numbers_out_of_range_are_refused(seed, position):
    with pytest.raises(ValueError, match="unsigned"):
        sampling.noise(seed, position, [0])


def test_of_equal_sums_the_lowest_token_wins():
    """24 bits repeat within a large vocabulary: two tokens with the same k and the same logit have the same sum."""
    k = sampling.uniforms(8, 0, np.arange(49_152))
    repeated, counts = np.unique(k, return_counts=True)
    twins = np.flatnonzero(k == repeated[counts == 2][0])
    values = np.full(49_152, -np.inf, dtype=np.float32)
    values[twins] = 1
    assert sampling.sample_token(values, 8, 0) == twins[0]


def test_margin_is_zero_for_the_honest_token_alone():
    values = logits(1003, 4.0)
    honest = sampling.sample_token(values, 11, 2)
    assert sampling.sampling_margin(values, 11, 2, honest) == 0
    others = [sampling.sampling_margin(values, 11, 2, token) for token in range(1003) if token != honest]
    assert min(others) > 0


def test_the_float32_recipe_stays_within_its_tolerance():
    k = np.unique(
        np.concatenate(
            [
                np.arange(5000),
                np.arange(2**23 - 5000, 2**23 + 5000),
                np.arange(2**24 - 5000, 2**24),
                np.random.default_rng(0).integers(0, 2**24, 200_000),
            ]
        )
    )
    low = (k + np.float32(0.5)).astype(np.float32) * np.float32(2**-24)
    high = ((2**24 - k).astype(np.float32) - np.float32(0.5)) * np.float32(2**-24)
    energy = np.where(k < 2**23, -np.log1p(-np.minimum(low, np.float32(0.5))), -np.log(high))
    noise = -np.log(energy)
    assert noise.dtype == np.float32
    assert np.abs(noise - sampling.gumbel(k)).max() <= sampling.FLOAT32_TOLERANCE


def test_the_naive_float32_formula_is_as_bad_as_the_module_says():
    top = np.float32(2**24 - 1 + 0.5) * np.float32(2**-24)
    assert top == 1  # k + 0.5 does not fit
    with np.errstate(divide="ignore"):
        assert -np.log(-np.log(top)) == math.inf
