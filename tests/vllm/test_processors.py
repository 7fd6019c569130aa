"""Both of vLLM's logits-processor interfaces draw what the reference draws, whatever happens to the batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollmesh_peer.models.sampling import draw
from tests.vllm.needs import skip_without_vllm

skip_without_vllm()

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext  # noqa: E402

from rollmesh_node.engine.vllm_sampler import V1SeededSampler, V2SeededSampler  # noqa: E402

pytestmark = pytest.mark.vllm

VOCABULARY = 257
SEEDS = (5, 2**64 - 1, 77, 123456789)


def params(seed=None, first=0):
    return SamplingParams(temperature=0.0, extra_args=None if seed is None else {"seed": seed, "first": first})


def random_logits(rows, *, seed=0):
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 3


def assert_decided(before, after, *, rows, seeds, positions):
    """Greedy choice over ``after`` is the seeded draw over ``before``, and the entry there is its raw log-prob."""
    drawn = draw(before[rows], seeds=seeds, positions=positions)
    assert after[rows].argmax(-1).tolist() == drawn.tokens.tolist()
    assert torch.equal(after[rows, drawn.tokens], drawn.logprobs)
    exact = before[rows].log_softmax(-1).gather(-1, drawn.tokens[:, None])[:, 0]
    assert torch.allclose(after[rows, drawn.tokens], exact, atol=1e-6)
    assert torch.isfinite(after[rows]).sum(-1).tolist() == [1] * len(rows)


def update(*, size, removed=(), added=(), moved=()):
    return BatchUpdate(batch_size=size, removed=removed, added=added, moved=moved)


@pytest.fixture
def v1():
    return V1SeededSampler(None, torch.device("cpu"), False)


def test_v1_counts_positions_in_vllm_s_own_list(v1):
    lists = [[], [9, 9], []]
    v1.update_state(
        update(
            size=3, added=[(row, params(seed, first=row * 10), None, lists[row]) for row, seed in enumerate(SEEDS[:3])]
        )
    )
    for step in range(3):
        before = random_logits(3, seed=step)
        after = v1.apply(before.clone())
        positions = [0 + len(lists[0]), 10 + len(lists[1]), 20 + len(lists[2])]
        assert_decided(before, after, rows=[0, 1, 2], seeds=SEEDS[:3], positions=positions)
        for drawn in lists:
            drawn.append(int(after[0].argmax()))
        v1.update_state(None)


def test_v1_follows_removals_moves_and_swaps(v1):
    v1.update_state(update(size=4, added=[(row, params(seed), None, [1] * row) for row, seed in enumerate(SEEDS)]))
    v1.update_state(
        update(
            size=3,
            removed=[1],
            moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL), (0, 2, MoveDirectionality.SWAP)],
        )
    )
    before = random_logits(3)
    after = v1.apply(before.clone())
    seeds, positions = [SEEDS[2], SEEDS[3], SEEDS[0]], [2, 3, 0]
    assert_decided(before, after, rows=[0, 1, 2], seeds=seeds, positions=positions)


def test_v1_reuses_a_row_for_a_new_request_and_leaves_foreign_rows_alone(v1):
    v1.update_state(update(size=2, added=[(0, params(1), None, [4]), (1, params(2), None, [])]))
    v1.update_state(update(size=2, removed=[0, 1], added=[(0, params(), None, []), (1, params(3, first=7), None, [])]))
    before = random_logits(2)
    after = v1.apply(before.clone())
    assert torch.equal(after[0], before[0])
    assert_decided(before, after, rows=[1], seeds=[3], positions=[7])


def slots(prompts):
    return SimpleNamespace(max_num_reqs=len(prompts), prompt_len=SimpleNamespace(np=np.array(prompts, dtype=np.int32)))


def context(rows, lengths):
    indices = torch.tensor(rows, dtype=torch.int32)
    return LogitsContext(
        expanded_idx_mapping=indices, idx_mapping=indices, idx_mapping_np=np.array(rows, dtype=np.int32),
        expanded_local_pos=torch.zeros_like(indices), input_ids=torch.zeros_like(indices), pos=indices,
        seq_lens_upper_bound_np=np.array(lengths, dtype=np.int32),
    )  # fmt: skip


def test_v2_takes_positions_from_the_length_of_the_sequence():
    v2 = V2SeededSampler(None, slots([10, 20, 30, 40]))
    assert [v2.add_request(slot, params(seed, first=slot)) for slot, seed in enumerate(SEEDS)] == [True] * 4
    before = random_logits(3)
    after = v2.apply(before.clone(), context([2, 0, 3], [30, 15, 41]))  # in any order; slot 1 is not in this step
    assert_decided(before, after, rows=[0, 1, 2], seeds=[SEEDS[2], SEEDS[0], SEEDS[3]], positions=[2, 5, 4])


def test_v2_in_the_middle_of_a_prompt_draws_something_and_does_not_fail():
    v2 = V2SeededSampler(None, slots([1000]))
    v2.add_request(0, params(6))
    before = random_logits(1)
    assert_decided(before, v2.apply(before.clone(), context([0], [512])), rows=[0], seeds=[6], positions=[0])


def test_v2_forgets_a_slot_s_last_request_and_leaves_foreign_rows_alone():
    v2 = V2SeededSampler(None, slots([4, 4]))
    v2.add_request(0, params(8))
    assert v2.add_request(0, params()) is False
    v2.add_request(1, params(9))
    before = random_logits(2)
    after = v2.apply(before.clone(), context([0, 1], [6, 6]))
    assert torch.equal(after[0], before[0])
    assert_decided(before, after, rows=[1], seeds=[9], positions=[2])


def test_v2_refuses_several_rows_of_one_request():
    v2 = V2SeededSampler(None, slots([4]))
    v2.add_request(0, params(8))
    with pytest.raises(RuntimeError, match="speculative"):
        v2.apply(random_logits(2), context([0], [5]))


@pytest.mark.parametrize("extra", [{"seed": 2**64}, {"seed": -1}, {"seed": "1"}, {"seed": 1, "first": -1}])
@pytest.mark.parametrize("processor", [V1SeededSampler, V2SeededSampler])
def test_a_request_without_a_seed_that_is_one_is_refused(processor, extra):
    with pytest.raises(ValueError, match="seed"):
        processor.validate_params(SimpleNamespace(extra_args=extra))
