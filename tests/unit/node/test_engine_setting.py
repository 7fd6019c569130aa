"""From the config and the machine to the engines' command lines, environments and load calls."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollmesh_node import engine_setting
from rollmesh_node.config import Engine
from rollmesh_node.engine_setting import choose_engine, share_engines
from rollmesh_protocol.errors import HostError, UsageError
from tests.unit.node.cards import make_card

TWO = "0, GPU-a, RTX 4090, 24564, 24000, 8.9\n1, GPU-b, RTX 4090, 24564, 24000, 8.9\n"
MODEL = json.dumps(
    {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "vocab_size": 300,
    }
).encode()  # fmt: skip


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with two GPUs and builds that can use them."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{TWO}'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(engine_setting, "_version", lambda name: "1.0" if name == "torch" else "")
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}


def test_one_engine_per_gpu_each_with_its_own_view(environ: dict[str, str]) -> None:
    config = Engine(backend="transformers")
    setting = choose_engine(config, environ=environ)
    assert (setting.declared.backend, setting.declared.device) == ("transformers", "cuda")
    engines = share_engines(setting, config, card=make_card(config=MODEL), environ=environ)
    assert [engine.name for engine in engines] == ["GPU 0", "GPU 1"]
    assert [engine.spec.environment["CUDA_VISIBLE_DEVICES"] for engine in engines] == ["0", "1"]
    assert [engine.load["gpus"] for engine in engines] == [[0], [1]]
    assert "2 engines" in engines[0].why and "asked for by name" in engines[0].why


def test_a_gpu_can_be_left_out(environ: dict[str, str]) -> None:
    config = Engine(backend="transformers", gpus=(1,))
    setting = choose_engine(config, environ=environ)
    assert setting.spec.environment["CUDA_VISIBLE_DEVICES"] == "1"
    (engine,) = share_engines(setting, config, card=make_card(config=MODEL), environ=environ)
    assert engine.spec.environment["CUDA_VISIBLE_DEVICES"] == "1" and engine.name == ""
    with pytest.raises(UsageError, match="names GPU 2"):
        choose_engine(Engine(gpus=(2,)), environ=environ)


def test_what_fits_nowhere_is_refused_before_an_engine_starts(environ: dict[str, str]) -> None:
    config = Engine(backend="transformers", memory_share=0.01)
    setting = choose_engine(config, environ=environ)
    with pytest.raises(HostError, match="GPU 0 has 24.0 GB"):
        share_engines(setting, config, card=make_card(config=MODEL), environ=environ)


def test_without_a_gpu_there_is_one_engine_and_the_reason_is_told(environ: dict[str, str]) -> None:
    config = Engine(device="cpu")
    setting = choose_engine(config, environ=environ)
    assert setting.declared.device == "cpu" and "engine.device is cpu" in setting.why
    assert share_engines(setting, config, card=make_card(config=MODEL), environ=environ) == (setting,)
    hidden = choose_engine(Engine(), environ=environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.declared.device == "cpu" and "no NVIDIA GPU was found" in hidden.why


def test_scripted_engines_are_as_many_as_the_numbers_in_the_config(environ: dict[str, str]) -> None:
    config = Engine(backend="scripted", gpus=(0, 3))
    engines = share_engines(choose_engine(config, environ=environ), config, card=make_card(), environ=environ)
    assert [engine.name for engine in engines] == ["GPU 0", "GPU 3"]


def test_vllm_that_is_not_installed_is_told_with_the_command(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = engine_setting.importlib.util.find_spec
    monkeypatch.setattr(engine_setting.importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(UsageError, match=r"pip install 'rollmesh\[vllm\]'"):
        choose_engine(Engine(backend="vllm"), environ=environ)


def test_an_automatic_vllm_has_transformers_behind_it_and_a_named_one_has_not(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = engine_setting.importlib.util.find_spec
    monkeypatch.setattr(engine_setting.importlib.util, "find_spec", lambda name: name == "vllm" or find(name))
    monkeypatch.setattr(engine_setting, "_version", lambda name: "1.0")
    config = Engine()
    setting = choose_engine(config, environ=environ)
    assert setting.declared.backend == "vllm" and setting.fallback is not None
    first, second = share_engines(setting, config, card=make_card(config=MODEL), environ=environ)
    assert first.fallback is not None and first.fallback.declared.backend == "transformers"
    assert second.fallback is not None and second.fallback.spec.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert choose_engine(Engine(backend="vllm"), environ=environ).fallback is None
