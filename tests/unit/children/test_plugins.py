"""Environments that are not built in: found, refused in words, and never in the way of a built-in one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rollmesh_peer.children import plugins
from rollmesh_peer.children.plugins import environment_names, load_environment
from rollmesh_protocol.errors import UsageError

MODULE = """
from rollmesh_protocol.environments.addition import make
broken = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "rollmesh_test_environment"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for loaded in (name, f"{name}_broken"):
        sys.modules.pop(loaded, None)


def test_module_path(module: str) -> None:
    environment = load_environment(f"{module}:make", {"high": 3}, seed=1)
    assert environment.item(0).question.startswith("What is")


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        (":missing", "does not import: AttributeError"),
        ("_missing:make", "does not import: ModuleNotFoundError"),
        ("_broken:make", "does not import: RuntimeError: boom"),
        (":broken", "is not a function"),
    ],
)
def test_code_that_does_not_load_is_refused_in_words(module: str, suffix: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_environment(module + suffix, {}, seed=1)


def test_entry_points_are_offered_and_cannot_shadow_built_in_ones(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {name: EntryPoint(name, f"{module}_broken:make", plugins.GROUP) for name in ("addition", "broken")}
    points["subtraction"] = EntryPoint("subtraction", f"{module}:make", plugins.GROUP)
    monkeypatch.setattr(plugins, "_installed", lambda: points)
    assert environment_names() == ("addition", "reasoning_gym", "broken", "subtraction")
    assert load_environment("addition", {}, seed=1).name == "addition"
    assert load_environment("subtraction", {}, seed=1).item(0).question
    with pytest.raises(UsageError, match="did you mean subtraction"):
        load_environment("substraction", {}, seed=1)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean addition"):
        load_environment("adition", {}, seed=1)
