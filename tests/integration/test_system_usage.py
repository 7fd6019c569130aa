"""Whatever an operator gets wrong is one clear sentence and an exit status, from the real command as a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trio

from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import open_ledger
from rollmesh_peer.testing.letters import NAME as LETTERS
from rollmesh_peer.testing.tiny_model import prepare_tiny
from tests.support.ports import free_port
from tests.support.system import open_system

DEADLINE_S = 90.0
"""Of one command; a quiet machine needs one to five seconds."""
USAGE, FAILED = 2, 1
CONFIG = """
[run]
name = "tiny"
folder = "{folder}/run"
[network]
listen = ["/ip4/127.0.0.1/tcp/{port}"]
[model]
source = "{folder}/model"
[[environments]]
name = "{environment}"
parameters = {{ {parameters} }}
{more}
"""


def _config(folder: Path, *, port: int = 0, environment: str = LETTERS, parameters: str = "", more: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(
        CONFIG.format(
            folder=folder, port=port or free_port(), environment=environment, parameters=parameters, more=more
        )
    )
    return path


def _learner(config: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollmesh_peer.command", "learner", "run", str(config), *flags],
        env={**os.environ, "ROLLMESH_HOME": str(config.parent / "home")},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, start_new_session=True,
    )  # fmt: skip


def _refused(ended: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """``ended`` with ``status`` and one sentence that has all ``words`` in it."""
    assert "Traceback" not in ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("rollmesh: ")]
    assert len(said) == 1, ended.stderr
    assert all(word in said[0] for word in words), said[0]
    assert ended.returncode == status
    assert ended.stdout == ""


# --- what is known before anything is started ------------------------------------------------------------------------


def test_an_unknown_key_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    ended = _learner(_config(tmp_path, more="[rollouts]\nstalenes = 2"))
    _refused(ended, USAGE, "run.toml", "stalenes", "staleness")


def test_a_value_of_the_wrong_type(tmp_path: Path) -> None:
    _refused(_learner(_config(tmp_path), "--set", "run.steps=many"), USAGE, "run.steps", "whole number")


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    flags = ("--set", "rollouts.publish_every=4", "--set", "rollouts.staleness=1")
    _refused(_learner(_config(tmp_path), *flags), USAGE, "publish_every", "staleness")


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    _refused(_learner(tmp_path / "nothing.toml"), USAGE, "nothing.toml", "No such file")


def test_the_resolved_config_is_shown_and_nothing_is_started(tmp_path: Path) -> None:
    config = _config(tmp_path, more="[training]\nlr = 1e-3")
    ended = _learner(config, "--set", "run.steps=7", "--check-config")
    assert ended.returncode == 0, ended.stderr
    shown = tomllib.loads(ended.stdout)
    assert (shown["run"]["steps"], shown["training"]["lr"], shown["rollouts"]["staleness"]) == (7, 1e-3, 2)
    assert not (tmp_path / "run").exists()
    again = tmp_path / "again.toml"
    again.write_text(ended.stdout)
    assert _learner(again, "--check-config").stdout == ended.stdout


# --- the folder of the run -------------------------------------------------------------------------------------------


def test_a_run_that_is_there_and_not_to_be_resumed(tmp_path: Path) -> None:
    async def begin() -> None:
        async with open_ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
            await ledger.commit(rows.put_meta("run", b"tiny-0"))

    trio.run(begin)
    ended = _learner(_config(tmp_path), "--set", "run.resume=false")
    _refused(ended, FAILED, "already holds a run", "run.resume")


def test_a_ledger_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "ledger.sqlite").write_bytes(b"no database" * 100)
    _refused(_learner(_config(tmp_path)), FAILED, "ledger.sqlite", "cannot be opened")


# --- the model -------------------------------------------------------------------------------------------------------


def test_a_model_folder_that_is_not_there(tmp_path: Path) -> None:
    _refused(_learner(_config(tmp_path)), USAGE, str(tmp_path / "model"))


def test_a_model_folder_of_pickles(tmp_path: Path) -> None:
    model = prepare_tiny(tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.rename(model / "pytorch_model.bin")
    _refused(_learner(_config(tmp_path)), USAGE, "pickle", "pytorch_model.bin", "safetensors")


def test_a_model_folder_with_code(tmp_path: Path) -> None:
    file = prepare_tiny(tmp_path / "model") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoModel": "evil.Model"}}))
    (tmp_path / "model" / "evil.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    _refused(_learner(_config(tmp_path)), USAGE, "auto_map", "never run")
    assert not (tmp_path / "was-run").exists()


def test_weights_that_are_not_those_of_the_model(tmp_path: Path) -> None:
    file = prepare_tiny(tmp_path / "model") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 3}))
    _refused(_learner(_config(tmp_path)), USAGE, "lacks 9 tensors", "model.layers.2.")


# --- the environments, which only children know ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "parameters", "words"),
    [
        ("adition", "", ("'adition'", "addition")),
        ("reasoning_gym", 'dataset = "countdown"', ("countdown", "sympy", "allow_text_evaluation")),
    ],
)
def test_an_environment_that_cannot_be_had(
    tmp_path: Path, environment: str, parameters: str, words: tuple[str, ...]
) -> None:
    prepare_tiny(tmp_path / "model")
    ended = _learner(_config(tmp_path, environment=environment, parameters=parameters))
    _refused(ended, USAGE, *words)


# --- the machine -----------------------------------------------------------------------------------------------------


def test_a_port_that_is_busy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _refused(_learner(_config(tmp_path, port=port)), FAILED, f"port {port} is in use")


async def test_a_second_learner_on_the_same_folder(tmp_path: Path) -> None:
    with open_system(tmp_path, steps=1) as system:
        with trio.fail_after(DEADLINE_S):
            while not (system.run_folder / "run.id").exists():
                await trio.sleep(0.05)
        ended = await trio.to_thread.run_sync(_learner, tmp_path / "run.toml")
        _refused(ended, FAILED, "another rollmesh daemon", "learner.key")
        assert system.learner.is_alive
