"""The torch version draws what the reference draws, and prunes nothing that could win."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from rollmesh_peer.models import sampling as batched
from rollmesh_protocol import sampling as reference
from rollmesh_protocol.errors import HostError
from tests.unit.sampling.make_vectors import VECTORS, logits

GOLDEN = json.loads(VECTORS.read_text())


def check(values: torch.Tensor, seeds: list[int], positions: list[int]) -> batched.Draws:
    """Compare one batch with the reference, row by row."""
    draws = batched.draw(values, seeds=seeds, positions=positions)
    plain = values.float().numpy()
    rows = zip(plain, seeds, positions, strict=True)
    assert draws.tokens.tolist() == [reference.sample_token(*row) for row in rows]
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        sums = plain[row].astype(np.float64) + reference.noise(seed, position, np.arange(plain.shape[1]))
        assert draws.best[row].item() == pytest.approx(sums.max(), abs=1e-12)
    torch.testing.assert_close(draws.normalizer, values.float().logsumexp(-1), atol=1e-5, rtol=1e-6)
    logprobs = values.double().log_softmax(-1).gather(1, draws.tokens[:, None])[:, 0]
    torch.testing.assert_close(draws.logprobs.double(), logprobs, atol=2e-5, rtol=0)
    return draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 5, 260, 1003, 49_152])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 20.0])
def test_draws_are_the_references(dtype, size, spread):
    generator = torch.Generator().manual_seed(size)
    values = (torch.randn(6, size, generator=generator) * spread).to(dtype)
    check(values, [0, 1, 1 << 32, (1 << 64) - 1, 12345678901234567890, 77], [0, 1, 2, 4095, 32_767, (1 << 32) - 1])


def test_more_rows_than_are_worked_on_at_once():
    rows = batched.ROWS_AT_ONCE * 2 + 1
    values = torch.randn(rows, 1000, generator=torch.Generator().manual_seed(1))
    check(values, list(range(rows)), [5] * rows)


@pytest.mark.parametrize("golden", GOLDEN["draws"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_draws(golden, dtype):
    values = torch.from_numpy(logits(golden["vocabulary"], golden["spread"])).to(dtype)
    assert torch.equal(values.float(), torch.from_numpy(logits(golden["vocabulary"], golden["spread"])))
    draws = batched.draw(values.expand(16, -1), seeds=[golden["seed"]] * 16, positions=list(range(16)))
    assert draws.tokens.tolist() == golden["tokens"]


def test_golden_noise():
    for row in GOLDEN["noise"]:
        ids = torch.tensor([row["tokens"]])
        noise = batched.noise(seeds=[row["seed"]], positions=[row["position"]], token_ids=ids)[0]
        expected = torch.tensor([float.fromhex(g) for g in row["noise"]], dtype=torch.float64)
        torch.testing.assert_close(noise, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["k_least", "k_most"])
def test_the_ends_of_the_lattice_decide_as_they_do_in_the_reference(name):
    """Its noise alone makes a token win or lose: G_MAX lifts it from 17 nats below, G_MIN loses from 2.8 above."""
    seed, position, token = GOLDEN["extremes"][name]
    leads = [-19.0, -17.5, -17.25, -8.0, -2.0, 0.0, 2.75, 3.0, 15.0, 17.0, 20.0, 21.0]
    values = torch.zeros(len(leads), 49_152)
    values[:, token] = torch.tensor(leads)
    tokens = check(values, [seed] * len(leads), [position] * len(leads)).tokens
    assert (tokens == token).any()
    assert (tokens != token).any()


def test_a_token_at_the_edge_of_pruning_can_win():
    """The winner lies just inside z* - G_MAX; a bound a little tighter would lose it."""
    seed, position, token = GOLDEN["extremes"]["k_least"]
    values = torch.full((1, 49_152), -math.inf)
    values[0, 5] = 0.0
    z = float(reference.noise(seed, position, 5))
    values[0, token] = float(np.nextafter(np.float32(z - reference.G_MAX), np.float32(10)))
    assert check(values, [seed], [position]).tokens.tolist() == [token]
    values[0, token] = z - reference.G_MAX - 1e-5
    assert check(values, [seed], [position]).tokens.tolist() == [5]


def test_tokens_just_outside_the_first_look_can_win():
    """Rows of two tokens in which the lighter one, a little beyond FIRST_LOOK below, wins by a thousandth."""
    seed, position = 31, 4
    noise = reference.noise(seed, position, np.arange(49_152))
    rows = []
    for heavy in range(300):
        gaps = noise - noise[heavy]
        just_outside = np.flatnonzero((gaps > batched.FIRST_LOOK) & (gaps < batched.FIRST_LOOK + 0.5))[:2]
        rows.extend((heavy, int(light), float(noise[heavy] - noise[light]) + 1e-3) for light in just_outside)
    assert len(rows) > 200
    values = torch.full((len(rows), 49_152), -math.inf)
    for row, (heavy, light, logit) in enumerate(rows):
        values[row, heavy], values[row, light] = 0.0, logit
    draws = batched.draw(values, seeds=[seed] * len(rows), positions=[position] * len(rows))
    assert draws.tokens.tolist() == [light for _, light, _ in rows]


def test_ties_go_to_the_lowest_token():
    """Noise of 24 bits repeats: two tokens with the same k and the same logit have the same sum."""
    k = reference.uniforms(8, 0, np.arange(49_152))
    values, counts = np.unique(k, return_counts=True)
    twins = np.flatnonzero(k == values[counts == 2][0])
    row = torch.full((1, 49_152), -math.inf)
    row[0, twins] = 1.0
    assert check(row, [8], [0]).tokens.tolist() == [int(twins[0])]


def test_tokens_that_are_ruled_out_stay_out():
    values = torch.full((3, 100), -math.inf)
    values[0, 7] = values[1, 98] = 0.0
    values[2, 3] = -1e30
    assert check(values, [1, 2, 3], [0, 0, 0]).tokens.tolist() == [7, 98, 3]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_are_an_error_not_a_token(broken):
    values = torch.zeros(2, 10)
    values[1, 4] = broken
    with pytest.raises(HostError, match="not finite"):
        batched.draw(values, seeds=[1, 2], positions=[0, 0])
    with pytest.raises(HostError, match="not finite"):
        batched.draw(torch.full((1, 10), -math.inf), seeds=[1], positions=[0])


def test_torchs_philox_is_numpys():
    generator = np.random.default_rng(0)
    c0, c1, k0, k1 = generator.integers(0, 2**32, (4, 5000))
    ours = batched.philox(*map(torch.from_numpy, (c0, c1, k0, k1)))
    theirs = reference.philox4x32((c0, c1, 0, 0), (k0, k1))
    assert np.array_equal(ours.numpy(), theirs.astype(np.int64))


def test_the_path_of_other_devices_draws_the_same(monkeypatch):
    """On CUDA the winners are found in torch; here the same code runs on the CPU."""
    values = torch.randn(5, 3000, generator=torch.Generator().manual_seed(3)) * 3
    seeds, positions = [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]
    expected = check(values, seeds, positions)
    monkeypatch.setattr(batched, "_is_here", lambda _values: False)
    assert torch.equal(batched.draw(values, seeds=seeds, positions=positions).tokens, expected.tokens)
    assert torch.equal(batched.draw(values, seeds=seeds, positions=positions).best, expected.best)


def test_numbers_of_rows_must_agree():
    with pytest.raises(ValueError, match="rows"):
        batched.draw(torch.zeros(2, 8), seeds=[1], positions=[0, 1])
