"""The memory plan: rows that fit, or a refusal with every number."""

from __future__ import annotations

import pytest

from rollmesh_node.engine.memory_plan import (
    CPU_RUNTIME_BYTES,
    GPU_RUNTIME_BYTES,
    ModelShape,
    allowed_bytes,
    model_shape,
    need_of,
    plan_memory,
)
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.limits import GIB, MIB

LLAMA_8B: dict[str, object] = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256,
}  # fmt: skip
IMAGE_8B = 16_060_522_496


def shape_of(config: dict[str, object]) -> ModelShape:
    shape = model_shape(config)
    assert shape is not None
    return shape


def test_the_shape_follows_the_defaults_of_the_model_library() -> None:
    shape = shape_of(LLAMA_8B)
    assert (shape.layers, shape.kv_heads, shape.head_size) == (32, 8, 128)
    assert shape.cache_token_bytes == 131_072  # the figure that Llama 3's users know: 128 KiB a token
    gemma = shape_of({**LLAMA_8B, "head_dim": 256, "num_key_value_heads": 4})
    assert gemma.cache_token_bytes == 2 * 2 * 32 * 4 * 256
    old = shape_of({name: value for name, value in LLAMA_8B.items() if name != "num_key_value_heads"})
    assert old.kv_heads == 32
    assert model_shape({"text_config": LLAMA_8B, "hidden_size": 1}) == shape
    assert model_shape({"hidden_size": True}) is None


def test_rows_grow_with_the_memory_up_to_what_is_asked() -> None:
    need = need_of(shape_of(LLAMA_8B), image_bytes=IMAGE_8B, columns=2048, on_gpu=True)
    assert need.weights_bytes == IMAGE_8B and need.runtime_bytes == GPU_RUNTIME_BYTES
    least = need.weights_bytes + need.runtime_bytes + need.row_bytes
    for rows in (1, 7, 64):
        free = least + (rows - 1) * need.usual_row_bytes
        plan = plan_memory(need, device="cuda:0", free_bytes=free, rows=64)
        assert plan.rows == rows and plan.free_bytes == free
        assert plan.cache_bytes == need.row_bytes + (rows - 1) * need.usual_row_bytes
        assert plan_memory(need, device="cuda:0", free_bytes=free + 1, rows=64).rows == rows
    assert plan_memory(need, device="cuda:0", free_bytes=200 * GIB, rows=64).rows == 64
    assert plan_memory(need, device="mps", free_bytes=None, rows=64).rows == 64


def test_a_refusal_has_every_number_and_the_device() -> None:
    need = need_of(shape_of(LLAMA_8B), image_bytes=IMAGE_8B, columns=2048, on_gpu=True)
    with pytest.raises(HostError) as refused:
        plan_memory(need, device="cuda:0", free_bytes=int(11.3 * GIB), rows=64)
    text = refused.value.detail
    for words in ("out of memory", "15.0 GB for the weights", "0.31 GB", "2,048 tokens", "1.5 GB to run",
                  "11.3 GB are free for it on cuda:0"):  # fmt: skip
        assert words in text, text
    short = need.weights_bytes + need.runtime_bytes + need.row_bytes - 1
    with pytest.raises(HostError):
        plan_memory(need, device="cuda:0", free_bytes=short, rows=1)


def test_float32_and_shared_models() -> None:
    shape = shape_of(LLAMA_8B)
    one = need_of(shape, image_bytes=IMAGE_8B, columns=1024, on_gpu=False)
    wide = need_of(shape, image_bytes=IMAGE_8B, columns=1024, on_gpu=False, dtype="float32")
    four = need_of(shape, image_bytes=IMAGE_8B, columns=1024, on_gpu=True, parts=4)
    assert one.runtime_bytes == CPU_RUNTIME_BYTES
    assert wide.weights_bytes == 2 * one.weights_bytes and one.row_bytes < wide.row_bytes < 2 * one.row_bytes
    assert four.weights_bytes == IMAGE_8B // 4 and four.row_bytes < one.row_bytes / 3
    odd = need_of(shape, image_bytes=IMAGE_8B, columns=1024, on_gpu=True, parts=16)
    eight = need_of(shape, image_bytes=IMAGE_8B, columns=1024, on_gpu=True, parts=8)
    assert odd.row_bytes == eight.row_bytes  # 8 key/value heads: the other GPUs hold copies


def test_the_owner_bounds_what_is_taken() -> None:
    assert allowed_bytes(10 * GIB, total_bytes=None, share=0.9, cap_gb=0) == 10 * GIB
    assert allowed_bytes(10 * GIB, total_bytes=10 * GIB, share=0.5, cap_gb=0) == 5 * GIB
    assert allowed_bytes(3 * GIB, total_bytes=10 * GIB, share=0.5, cap_gb=0) == 3 * GIB
    assert allowed_bytes(10 * GIB, total_bytes=10 * GIB, share=0.9, cap_gb=0.25) == 256 * MIB
