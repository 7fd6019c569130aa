"""Which backend is taken on which machine, with its reason in one sentence."""

from __future__ import annotations

import pytest

from rollmesh_node.config import Engine
from rollmesh_node.engine_choice import Machine, choose_backend
from rollmesh_node.gpus import Gpu
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.limits import GIB

MODEL = frozenset({"torch", "transformers", "safetensors"})
ALL = MODEL | {"vllm"}


def gpu(capability: tuple[int, int] = (9, 0), gigabytes: int = 80) -> Gpu:
    return Gpu(
        index=0, uuid="GPU-0", name="NVIDIA X", memory_bytes=gigabytes * GIB, free_bytes=0, capability=capability
    )


@pytest.mark.parametrize(
    ("machine", "settings", "backend", "device", "why"),
    [
        (Machine(modules=ALL, gpus=(gpu(),)), {}, "vllm", "cuda", "NVIDIA X (80 GB, compute capability 9.0) is fit"),
        (Machine(modules=ALL), {}, "transformers", "cpu", "no NVIDIA GPU was found"),
        (Machine(modules=MODEL, gpus=(gpu(),)), {}, "transformers", "cuda", "vLLM is not installed"),
        (Machine(modules=ALL, gpus=(gpu((7, 5)),)), {}, "transformers", "cuda", "capability 7.5"),
        (Machine(modules=ALL, gpus=(gpu((8, 6), 4),)), {}, "transformers", "cuda", "4 GB"),
        (Machine(modules=ALL, gpus=(gpu((7, 5)), gpu())), {}, "vllm", "cuda", "9.0"),
        (Machine(modules=ALL, gpus=(gpu(),)), {"device": "cpu"}, "transformers", "cpu", "engine.device is cpu"),
        (Machine(modules=ALL, gpus=(gpu(),)), {"dtype": "float32"}, "transformers", "cuda", "float32"),
        (Machine(modules=ALL, gpus=(gpu(),), vllm_on_gpu=False), {}, "transformers", "cuda", "vLLM is the build"),
        (Machine(modules=ALL, gpus=(gpu(),), torch_on_gpu=False), {}, "transformers", "cpu", "torch is the build"),
        (Machine(modules=ALL), {"backend": "vllm"}, "vllm", "cpu", "by name"),
        (Machine(modules=ALL, gpus=(gpu(),)), {"backend": "vllm"}, "vllm", "cuda", "by name"),
        (Machine(modules=ALL, gpus=(gpu(),)), {"backend": "transformers"}, "transformers", "cuda", "by name"),
        (Machine(modules=MODEL), {"device": "cuda"}, "transformers", "cuda", "vLLM is not installed"),
        (Machine(modules=frozenset()), {"backend": "scripted"}, "scripted", "none", "without a model"),
    ],
)  # fmt: skip
def test_choice(machine: Machine, settings: dict, backend: str, device: str, why: str) -> None:
    choice = choose_backend(Engine(**settings), machine)
    assert (choice.backend, choice.device) == (backend, device)
    assert why in choice.why, choice.why


def test_what_is_not_installed_is_named_with_the_command() -> None:
    with pytest.raises(UsageError, match=r"vllm, not installed here: .*rollmesh\[vllm\]"):
        choose_backend(Engine(backend="vllm"), Machine(modules=MODEL))
    with pytest.raises(UsageError, match=r"torch, not installed here: pip install 'rollmesh\[engine\]'"):
        choose_backend(Engine(), Machine(modules=MODEL - {"torch"}))
    with pytest.raises(UsageError, match="needs engine.backend=vllm"):
        choose_backend(Engine(backend="transformers", tensor_parallel=2), Machine(modules=ALL, gpus=(gpu(),)))
