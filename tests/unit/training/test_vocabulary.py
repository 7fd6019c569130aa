"""Log-probabilities piece by piece: against the whole table, for values and gradients, within the memory promised."""

import pytest
import torch
from torch import Tensor, nn

from rollmesh_learner.training import vocabulary


def setting(dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    head = nn.Linear(16, 50, bias=False).to(dtype)
    return head, torch.randn(23, 16, dtype=dtype), torch.randint(0, 50, (23,))


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
def test_values_and_gradients_equal_the_whole_table(chunk: int) -> None:
    head, start, tokens = setting(torch.float32)
    slope = torch.linspace(-2, 3, 23)
    states = start.clone().requires_grad_()
    whole = head(states * 1.5).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    (whole * slope).sum().backward()
    expected_head, expected_states = head.weight.grad.clone(), states.grad.clone()

    head.zero_grad()
    states = start.clone().requires_grad_()
    values, loss = vocabulary.backward(
        head, states=states * 1.5, tokens=tokens, loss_of=lambda v, part: (v * slope[part]).sum(), chunk=chunk
    )
    torch.testing.assert_close(values, whole.detach())
    torch.testing.assert_close(loss, (whole * slope).sum().detach())
    torch.testing.assert_close(head.weight.grad, expected_head)
    torch.testing.assert_close(states.grad, expected_states)
    torch.testing.assert_close(
        vocabulary.logprobs(head, states=start * 1.5, tokens=tokens, chunk=chunk), whole.detach()
    )


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    head, states, tokens = setting(torch.bfloat16)
    values = vocabulary.logprobs(head, states=states, tokens=tokens, chunk=8)
    assert values.dtype == torch.float32
    whole = head(states).float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(values, whole.detach(), rtol=1e-6, atol=1e-6)


def test_no_more_than_a_chunk_reaches_the_vocabulary() -> None:
    head, states, tokens = setting(torch.float32)
    seen = []
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape[0]))
    vocabulary.backward(head, states=states.requires_grad_(), tokens=tokens, loss_of=lambda v, part: v.sum(), chunk=10)
    assert seen == [10, 10, 3]


def test_chunk_follows_the_bytes() -> None:
    assert vocabulary.chunk_tokens(49_152, logits_bytes=128 * 2**20) == 682
    assert vocabulary.chunk_tokens(10**6, logits_bytes=2**20) == vocabulary.LEAST_CHUNK
