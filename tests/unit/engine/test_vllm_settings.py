"""What vLLM is started with: its environment, and how much memory its cache may take."""

from __future__ import annotations

import os

import pytest

from rollmesh_node.engine import memory, vllm_settings
from rollmesh_peer.models.architecture import read_config
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError
from tests.unit.models.tiny import small_config


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))


def prepare(folder, **changed):
    vllm_settings.prepare(**{"device": "cpu", "threads": 0, "gpus": (), "cache": folder, **changed})


def test_nothing_is_fetched_and_nothing_reported(tmp_path):
    prepare(tmp_path / "cache")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        assert os.environ[name] == "1"
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_threads_gpus_and_runner_reach_vllm_s_processes(tmp_path):
    prepare(tmp_path, threads=3)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_USE_V2_MODEL_RUNNER"]) == ("3", "0")
    prepare(tmp_path, device="cuda", gpus=(2, 0))
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["VLLM_USE_V2_MODEL_RUNNER"]) == ("2,0", "1")


def test_compiled_code_is_not_kept_where_others_write(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(HostError, match="can be written by others"):
        prepare(tmp_path)


def plan(monkeypatch, *, free, weights=0, rows=8, wanted=0, device="cpu"):
    monkeypatch.setattr(memory, "free_bytes", lambda **_: free)
    config = read_config(small_config("llama"))
    return vllm_settings.plan_cache(config, device=device, weights_bytes=weights, max_rows=rows, wanted=wanted)


def test_the_cache_takes_what_all_rows_can_use_and_a_share_of_what_is_free(monkeypatch):
    per_token = 2 * 2 * 2 * 2 * 8  # keys and values, bf16, layers, heads of keys, their size
    assert plan(monkeypatch, free=100 * limits.GIB) == max(8 * 256 * per_token, limits.MIB)
    assert plan(monkeypatch, free=100 * limits.GIB, rows=100_000) == 100_000 * 256 * per_token
    assert plan(monkeypatch, free=1000 * limits.GIB, rows=10_000_000) == vllm_settings.CPU_CACHE_BYTES
    short = plan(monkeypatch, free=3 * limits.GIB, weights=limits.GIB, rows=10_000_000)
    assert short == int((2 * limits.GIB - memory.RUNTIME_BYTES) * vllm_settings.CPU_CACHE_SHARE)
    assert plan(monkeypatch, free=100 * limits.GIB, wanted=limits.GIB) == limits.GIB
    assert plan(monkeypatch, free=100 * limits.GIB, device="cuda") == 0


def test_weights_and_cache_that_do_not_fit_are_refused_with_the_numbers(monkeypatch):
    with pytest.raises(HostError, match=r"needs 2\.1 GB .* 1\.1 GB are free"):
        plan(monkeypatch, free=limits.GIB, weights=limits.GIB, wanted=limits.GIB)
