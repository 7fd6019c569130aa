"""Data sets whose scorer runs the answer as code, switched on by the operator: the code runs, and gets nowhere.

Each answer is an expression that the scorer's ``eval`` or sympy's ``parse_expr`` carries out. It tries one thing and
then writes into the result pipe, before the scorer can: reward 1.0 where it got through, else the name of the error.
So an error's name in the score shows both that the code ran and that it was refused. That an answer can name its own
reward is what ``allow_text_evaluation`` means, and the last test shows it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from rollmesh_peer.children.process import open_child
from rollmesh_peer.children.scoring import ENVIRONMENT_VARIABLES, EnvironmentChoice, open_scorer, score, scorer_spec
from rollmesh_protocol.environments.interface import Item
from rollmesh_protocol.environments.reasoning_gym import TEXT_EVALUATING, make

DATASETS = sorted(set(TEXT_EVALUATING) - {"composite"})
"""``composite`` passes answers on to these."""

ATTEMPTS = {
    "write a file": "open({folder!r} + '/written', 'w').write('x')",
    "append to the ledger": "open({folder!r} + '/ledger', 'a').write('x')",
    "read the key": "open({folder!r} + '/key').read()",
    "open a socket": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "open a datagram socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "start a process": "os.fork() or os._exit(0)",
    "run a program": "import subprocess; subprocess.run(['true'], check=True)",
}

CODE = """
import os, struct
try:
    {attempt}
    told = struct.pack('<d', 1.0)
except BaseException as error:
    told = struct.pack('<d', float('nan')) + type(error).__name__.encode()
os.write(3, told)
os._exit(0)
"""

WITHOUT_SANDBOX = """
import json, os, sys
from rollmesh_protocol.environments.reasoning_gym import make
found = {}
for dataset in json.loads(sys.argv[1]):
    environment = make({"dataset": dataset, "allow_text_evaluation": True}, seed=3)
    item, right = environment.item(5), str(environment._entry(5)["answer"])
    outcomes = []
    for answer in json.loads(sys.argv[2]):
        incoming, outgoing = os.pipe()
        if os.fork() == 0:
            os.dup2(outgoing, 3)
            environment.reward(item, answer)
            os._exit(0)
        os.close(outgoing)
        os.wait()
        outcomes.append(os.read(incoming, 100).hex())
        os.close(incoming)
    found[dataset] = [item.to_plain(), right, environment.reward(item, right), outcomes]
print()
print(json.dumps(found))
"""


def expression(attempt: str) -> str:
    """One call with one text, each character escaped, so that no scorer trips over a quote, a space or a comma."""
    return "exec('" + "".join(f"\\x{byte:02x}" for byte in CODE.format(attempt=attempt).encode()) + "')"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "ledger").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        yield tmp_path, [expression(text.format(folder=str(tmp_path), port=port)) for text in ATTEMPTS.values()]


async def test_what_an_evaluated_answer_tries_gets_nowhere(stage: tuple[Path, list[str]]) -> None:
    pytest.importorskip("reasoning_gym")
    folder, answers = stage
    argv = [sys.executable, "-c", WITHOUT_SANDBOX, json.dumps(DATASETS), json.dumps(answers)]
    variables = {**ENVIRONMENT_VARIABLES, "PATH": os.defpath}
    run = await trio.run_process(argv, capture_stdout=True, env=variables)
    control = json.loads(run.stdout.decode().splitlines()[-1])
    through = struct.pack("<d", 1.0).hex()
    for dataset, (_, _, _, outcomes) in control.items():
        assert outcomes == [through] * len(answers), f"{dataset}: the control must get through without a sandbox"
    (folder / "written").unlink()
    (folder / "ledger").write_text("")

    choices = [
        EnvironmentChoice(name="reasoning_gym", parameters={"dataset": dataset, "allow_text_evaluation": True})
        for dataset in DATASETS
    ]
    async with open_child(scorer_spec()) as child:
        confinement = await open_scorer(child, choices, seed=3, hidden=[folder])
        if confinement.holes:
            pytest.skip(f"this kernel cannot hold everything: {confinement}")
        for number, dataset in enumerate(DATASETS):
            plain, right, reward, _ = control[dataset]
            item = Item.from_plain(plain)
            for attempt, answer in zip(ATTEMPTS, answers, strict=True):
                (one,) = await score(child, number, item, [answer])
                refused = {"PermissionError", "FileNotFoundError"}
                if "landlock" not in confinement.active and "empty root" not in confinement.active:
                    assert attempt == "read the key" or one.error in refused, (dataset, attempt, one)
                else:
                    assert (one.reward, one.error in refused) == (0.0, True), (dataset, attempt, one)
            assert [one.reward for one in await score(child, number, item, [right])] == [reward], dataset
    assert not (folder / "written").exists()
    assert (folder / "ledger").read_text() == ""


async def test_an_evaluated_answer_names_its_own_reward_and_no_other_call_s() -> None:
    pytest.importorskip("reasoning_gym")
    parameters = {"dataset": "string_insertion", "allow_text_evaluation": True}
    item = make(parameters, seed=3).item(5)
    async with open_child(scorer_spec()) as child:
        await open_scorer(child, [EnvironmentChoice(name="reasoning_gym", parameters=parameters)], seed=3)
        (forged,) = await score(child, 0, item, [expression("pass")])
        (other,) = await score(child, 0, item, ["no"])
        assert (forged.reward, other.reward) == (1.0, 0.0)
