"""What is read of a model folder without torch, and what is refused."""

from __future__ import annotations

import json

import pytest

from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.testing.tiny_model import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, prepare_tiny
from rollmesh_protocol.errors import Refused, UsageError


@pytest.fixture
def folder(tmp_path):
    return prepare_tiny(tmp_path / "model")


def edit(folder, name, **fields):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_good_folder(folder):
    opened = ModelFolder.open(folder)
    assert opened.stop_tokens == (END_OF_TEXT, TURN_END)
    assert opened.chat_template == CHAT_TEMPLATE
    assert opened.special_tokens["eos_token"] == "<|im_end|>"
    assert opened.config["model_type"] == "llama"


def test_stop_tokens_fall_back_to_the_config(folder):
    (folder / "generation_config.json").unlink()
    assert ModelFolder.open(folder).stop_tokens == (TURN_END,)


def test_a_model_without_stop_tokens_is_refused(folder):
    (folder / "generation_config.json").unlink()
    edit(folder, "config.json", eos_token_id=None)
    with pytest.raises(UsageError, match="eos_token_id"):
        _ = ModelFolder.open(folder).stop_tokens


def test_the_template_may_stand_in_the_tokenizer_config(folder):
    (folder / "chat_template.jinja").unlink()
    assert ModelFolder.open(folder).chat_template is None
    edit(folder, "tokenizer_config.json", chat_template="x", eos_token={"content": "</s>"})
    assert ModelFolder.open(folder).chat_template == "x"
    assert ModelFolder.open(folder).special_tokens["eos_token"] == "</s>"


def test_missing_things_are_named(folder, tmp_path):
    with pytest.raises(UsageError, match="no model folder"):
        ModelFolder.open(tmp_path / "none")
    with pytest.raises(UsageError, match=r"config\.json"):
        ModelFolder.open(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        _ = ModelFolder.open(folder).tokenizer
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="safetensors"):
        ModelFolder.open(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(Refused, match="pickle") as refusal:
        ModelFolder.open(folder)
    assert refusal.value.code == "card.model"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(folder, name):
    edit(folder, name, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(Refused, match="never run") as refusal:
        ModelFolder.open(folder)
    assert refusal.value.code == "card.model"


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\xff"])
def test_broken_json_is_an_error_of_ours(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"config\.json"):
        ModelFolder.open(folder)
