"""Every model type that vLLM runs: tiny random ones, in one process after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmesh_node.engine.backend import GroupRequest, SampleRequest, Weights
from rollmesh_node.engine.vllm_backend import UNPROVEN, VllmBackend
from rollmesh_peer.models.architecture import MODEL_TYPES
from rollmesh_peer.models.image import layout_of, weights_of, write_image
from rollmesh_peer.models.loader import build_model
from rollmesh_protocol.errors import Refused
from tests.unit.models.tiny import small_config
from tests.vllm.needs import NEEDS_VLLM
from tests.vllm.running import assert_honest, finish, tokens_of

pytestmark = [NEEDS_VLLM, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

VOCABULARY = 300
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 1024}
"""vLLM's attention on a CPU wants heads of 32 and more."""


class Tiny:
    """A random bf16 model of a type: config, layout, two images, and the model in transformers."""

    def __init__(self, folder, model_type, **fields):
        self.config = small_config(model_type, **SIZES, **fields)
        self.model = build_model(self.config)
        self.layout = layout_of(self.model)
        self.images = [folder / f"{model_type}-{number}" for number in range(2)]
        for number, image in enumerate(self.images):
            generator = torch.Generator().manual_seed(number)
            for tensor in weights_of(self.model).values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.12 + (tensor.ndim == 1))
            write_image(weights_of(self.model), layout=self.layout, image=image)

    def weights(self, number):
        return Weights(config=self.config, layout=self.layout, image=self.images[number])


def groups(*, lengths, samples, most, longest_first=False):
    generator = np.random.default_rng(5)
    return [
        GroupRequest(
            key=key,
            prompt=generator.integers(3, VOCABULARY, length).astype(np.uint32),
            samples=tuple(SampleRequest(index=i, seed=key * 1000 + i) for i in range(samples)),
            max_new_tokens=most,
            stop=frozenset(),
        )
        for key, length in enumerate(lengths)
    ]


def a_backend(**settings):
    return VllmBackend(
        threads=1, max_rows=8, device="cpu", **{"cache_bytes": 64 << 20, "enforce_eager": True, **settings}
    )


@pytest.fixture
def backend():
    torch.set_num_threads(1)
    made = a_backend()
    yield made
    made.close()


CASES = [(name, {}) for name in MODEL_TYPES if name not in UNPROVEN] + [
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("model_type", "fields"), CASES, ids=lambda value: str(value or ""))
def test_a_type_draws_its_own_tokens_after_a_load_and_after_a_swap(backend, tmp_path, model_type, fields):
    tiny = Tiny(tmp_path, model_type, **fields)  # its model in transformers holds the second image
    requests = groups(lengths=[7, 30, 1, 90], samples=4, most=24)
    backend.load(tiny.weights(1))
    loaded = finish(backend, requests)
    assert_honest(tiny.model, requests, loaded)
    backend.swap(tiny.images[0])
    assert tokens_of(finish(backend, requests)) != tokens_of(loaded)
    backend.swap(tiny.images[1])
    assert_honest(tiny.model, requests, finish(backend, requests))


def test_rows_that_the_cache_throws_out_come_back_at_their_position(tmp_path):
    tiny = Tiny(tmp_path, "llama")
    per_token = 2 * 2 * 2 * 2 * 32
    backend = a_backend(cache_bytes=1100 * per_token)  # eight rows of 300 tokens do not fit side by side
    requests = groups(lengths=[100] * 8, samples=1, most=200)
    try:
        backend.load(tiny.weights(1))
        assert_honest(tiny.model, requests, finish(backend, requests))
    finally:
        backend.close()


def test_float32_arithmetic(tmp_path):
    tiny = Tiny(tmp_path, "llama")
    backend = a_backend(dtype="float32")
    requests = groups(lengths=[9, 40], samples=4, most=24)
    try:
        backend.load(tiny.weights(1))
        assert_honest(tiny.model, requests, finish(backend, requests))
    finally:
        backend.close()


def test_other_models_are_refused_by_name(backend, tmp_path):
    tiny = Tiny(tmp_path, "llama")
    with pytest.raises(Refused, match="'mamba' is not one of"):
        backend.load(Weights(config={**tiny.config, "model_type": "mamba"}, layout=tiny.layout, image=tiny.images[0]))
    mixture = Tiny(tmp_path, "qwen3_moe")
    with pytest.raises(Refused, match="qwen3_moe in vLLM: after a reload"):
        backend.load(mixture.weights(0))
    with pytest.raises(Refused, match="other tensors than the layout"):
        backend.load(Weights(config={**tiny.config, "vocab_size": 400}, layout=tiny.layout, image=tiny.images[0]))
