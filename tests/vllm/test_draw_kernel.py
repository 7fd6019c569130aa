"""The draw for GPUs, in Triton's interpreter on a CPU: the reference's token and log-prob, row by row.

The interpreter is chosen by an environment variable that triton reads when it is imported: a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from rollmesh_peer.models.sampling import draw
from rollmesh_protocol import sampling as reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton comes with vLLM; `make test-vllm` sets it up"),
]


def logits_and_keys():
    """Rows of several shapes: flat, peaked, one token beyond the others' reach, ties; 9 pieces less 3 tokens wide."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn((6, 9 * 4096 - 3), generator=generator)
    logits[1] *= 6
    logits[2, 30_000] = 60.0
    logits[3, 5:30_000] = -80.0
    logits[4] = 0.0
    seeds = [1, 2**64 - 1, 2**63 + 5, 7, 123456789012345, 0]
    positions = [0, 3, 2**31 - 1, 77, 12, 5]
    return logits, seeds, positions


def test_the_kernel_draws_what_the_reference_draws(tmp_path):
    logits, seeds, positions = logits_and_keys()
    result = tmp_path / "drawn.npz"
    code = "\n".join([
        "import torch, numpy as np",
        "from rollmesh_node.engine.vllm_draw import draw_without_waiting",
        "from rollmesh_protocol.sampling import split_seed",
        "from tests.vllm.test_draw_kernel import logits_and_keys",
        "logits, seeds, positions = logits_and_keys()",
        "keys = torch.tensor([(p, *split_seed(s)) for s, p in zip(seeds, positions)])",
        "tokens, logprobs = draw_without_waiting(logits, keys=keys)",
        "logits[:, :] = float('nan')",
        "_, broken = draw_without_waiting(logits, keys=keys)",
        f"np.savez({str(result)!r}, tokens=tokens, logprobs=logprobs, broken=broken)",
    ])  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    found = np.load(result)
    expected = draw(logits, seeds=seeds, positions=positions)
    assert found["tokens"].tolist() == expected.tokens.tolist()
    assert np.abs(found["logprobs"] - expected.logprobs.numpy()).max() < 1e-4
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert reference.sample_token(logits[row].numpy(), seed, position) == found["tokens"][row]
    assert np.isnan(found["broken"]).all(), "a broken model's rows are told by their log-probs"
