"""The base import: where a model comes from does not matter afterwards, and what must not be loaded is not."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmesh_peer.models import base
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.models.image import weights_of
from rollmesh_peer.models.loader import load_model
from rollmesh_peer.testing.tiny_model import prepare_tiny
from rollmesh_protocol.errors import HostError, Refused, UsageError


@pytest.fixture
def folder(tmp_path):
    return prepare_tiny(tmp_path / "source", seed=3)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_a_folder_in_the_loaders_form_is_used_where_it_lies(folder, cache):
    assert base.import_base(str(folder), cache=cache) == folder
    assert not cache.exists()


def test_the_image_holds_the_folders_weights(folder, tmp_path):
    layout = base.write_base_image(folder, image=tmp_path / "image")
    model = load_model(ModelFolder.open(folder).config, layout=layout, image=tmp_path / "image")
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == weights_of(model).keys()
    for name, tensor in weights_of(model).items():
        assert torch.equal(tensor, stored[name])


def test_a_float32_folder_is_converted_once(folder, cache, tmp_path):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({name: tensor.float() for name, tensor in weights.items()}, folder / "a.safetensors", {"format": "pt"})
    (folder / "a.safetensors").rename(folder / "model.safetensors")
    made = base.import_base(str(folder), cache=cache)
    assert made.parent == cache
    assert {name: t.dtype for name, t in load_file(made / "model.safetensors").items()} == dict.fromkeys(
        weights, torch.bfloat16
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(made / "model.safetensors").items())
    before, after = ModelFolder.open(folder), ModelFolder.open(made)
    assert after.stop_tokens == before.stop_tokens
    assert after.chat_template == before.chat_template
    assert after.tokenizer.is_file()
    assert base.write_base_image(made, image=tmp_path / "image").image_bytes > 0
    stamp = (made / "config.json").stat().st_mtime_ns
    assert base.import_base(str(folder), cache=cache) == made
    assert (made / "config.json").stat().st_mtime_ns == stamp
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    assert base.import_base(str(folder), cache=cache) != made


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        ("gguf:rollmesh-no-such-package", UsageError, "pip install"),
        ("gguf:numpy", UsageError, "0 .gguf files"),
        ("hub:no-slash", UsageError, "organisation"),
        ("hub:a/b/../../c", UsageError, "organisation"),
        ("/no/such/folder", UsageError, "no model folder"),
    ],
)
def test_sources_that_are_none(source, error, why, cache):
    with pytest.raises(error, match=why):
        base.import_base(source, cache=cache)
    assert not cache.exists()


def test_a_hub_model_without_a_network_says_so(cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HostError, match="check the network, or name a local folder"):
        base.import_base("hub:rollmesh/no-such-model", cache=cache)


def test_pickles_and_code_are_refused(folder, cache):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "evil.M"}}))
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(Refused, match="never run"):
        base.import_base(str(folder), cache=cache)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(Refused, match="pickle"):
        base.import_base(str(folder), cache=cache)


def test_a_hub_snapshot_is_checked_like_any_folder(folder, cache, monkeypatch):
    asked = {}

    def snapshot(repository, *, revision, allow_patterns):
        asked.update(repository=repository, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert base.import_base("hub:some/model@v1.0", cache=cache) == folder
    assert asked["repository"] == "some/model"
    assert asked["revision"] == "v1.0"
    assert not any(pattern.endswith((".bin", ".py", ".pt", ".pkl")) for pattern in asked["patterns"])


def test_missing_tensors_are_named(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.up_proj"):
        base.write_base_image(folder, image=tmp_path / "image")


def test_a_truncated_file_is_an_error_of_ours(folder, tmp_path, cache):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot be read"):
        base.import_base(str(folder), cache=cache)


def test_a_failed_conversion_leaves_nothing_and_two_at_once_make_one(tmp_path):
    cache, calls = tmp_path / "cache", []

    def fail(folder):
        (folder / "half").write_text("x")
        raise HostError("no")

    with pytest.raises(HostError):
        base._cached(cache, "m", fail)
    assert [path.name for path in cache.iterdir()] == [".m.lock"]

    def make(folder):
        calls.append(folder)
        prepare_tiny(folder)

    threads = [threading.Thread(target=base._cached, args=(cache, "m", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert ModelFolder.open(cache / "m").stop_tokens
