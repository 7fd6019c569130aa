"""The scoring child and the prompter together: every allowed data set is scored inside as it is outside."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from rollmesh_peer.children.process import open_child
from rollmesh_peer.children.score import Score
from rollmesh_peer.children.scoring import (
    ENVIRONMENT_VARIABLES,
    EnvironmentChoice,
    open_scorer,
    score,
    scorer_spec,
)
from rollmesh_protocol.environments.interface import Item
from rollmesh_protocol.environments.registry import make_environment
from rollmesh_protocol.errors import ChildFailed, HostError, RollmeshError, UsageError

ADDITION = EnvironmentChoice(name="addition")

OUTSIDE = """
import json, sys
from rollmesh_protocol.environments.reasoning_gym import TEXT_EVALUATING, make
from reasoning_gym.factory import DATASETS
found = {}
for dataset in sorted(set(DATASETS) - set(TEXT_EVALUATING)):
    environment = make({"dataset": dataset}, seed=11)
    item = environment.item(6)
    answers = [str(environment._entry(6)["answer"]), "no idea", "", "[[1, 2], [3, 4]]", "a" * 500]
    rewards = []
    for answer in answers:
        try:
            rewards.append(environment.reward(item, "<answer>" + answer + "</answer>"))
        except Exception as error:
            rewards.append(type(error).__name__)
    found[dataset] = [item.to_plain(), answers, rewards]
print()  # some data sets print, too
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_every_data_set_is_scored_inside_as_it_is_outside() -> None:
    """Confinement must not change a reward: late imports, word lists and numpy have to work in there."""
    pytest.importorskip("reasoning_gym")
    argv = [sys.executable, "-c", OUTSIDE]
    run = await trio.run_process(argv, capture_stdout=True, env={**ENVIRONMENT_VARIABLES, "PATH": os.defpath})
    outside = json.loads(run.stdout.decode().splitlines()[-1])
    assert len(outside) > 90
    choices = [EnvironmentChoice(name="reasoning_gym", parameters={"dataset": dataset}) for dataset in outside]
    async with open_child(scorer_spec()) as child:
        confinement = await open_scorer(child, choices, seed=11)
        assert confinement.holes == ()
        for number, (dataset, (plain, answers, rewards)) in enumerate(outside.items()):
            tagged = [f"<answer>{answer}</answer>" for answer in answers]
            scores = await score(child, number, Item.from_plain(plain), tagged)
            inside = [one.error.split(":")[0] if one.error else one.reward for one in scores]
            assert inside == rewards, dataset
    right = [rewards[0] for _, _, rewards in outside.values()]
    assert sum(reward == 1.0 for reward in right) > 0.9 * len(right)


async def test_hash_seed_is_fixed_where_items_are_made() -> None:
    """``isomorphic_strings`` draws from a set: with another hash seed the scorer would make another item."""
    pytest.importorskip("reasoning_gym")
    choice = EnvironmentChoice(name="reasoning_gym", parameters={"dataset": "isomorphic_strings"})
    code = (
        "import json; from rollmesh_protocol.environments.reasoning_gym import make;"
        "print(json.dumps(make({'dataset': 'isomorphic_strings'}, seed=1).item(2).to_plain()))"
    )
    plain = []
    for hash_seed in ("0", "1"):
        environment = {**ENVIRONMENT_VARIABLES, "PATH": os.defpath, "PYTHONHASHSEED": hash_seed}
        run = await trio.run_process([sys.executable, "-c", code], capture_stdout=True, env=environment)
        plain.append(json.loads(run.stdout))
    assert plain[0] != plain[1]
    spec = scorer_spec()
    without = {name: value for name, value in spec.environment.items() if name != "PYTHONHASHSEED"}
    for variables in (spec.environment, without):  # the child sets it itself where its daemon forgot
        async with open_child(type(spec)(name="scorer", argv=spec.argv, environment=variables)) as child:
            await open_scorer(child, [choice], seed=1)
            assert [one.error for one in await score(child, 0, Item.from_plain(plain[0]), ["x"])] == [None]
            with pytest.raises(HostError, match="PYTHONHASHSEED"):
                await score(child, 0, Item.from_plain(plain[1]), ["x"])


async def test_wrong_configs_are_told_and_the_child_lives_on() -> None:
    async with open_child(scorer_spec()) as child:
        item = make_environment("addition", {}, seed=1).item(0)
        with pytest.raises(ChildFailed, match="has not been opened"):
            await score(child, 0, item, ["1"])
        with pytest.raises(UsageError, match="did you mean addition"):
            await open_scorer(child, [EnvironmentChoice(name="adition")], seed=1)
        with pytest.raises(UsageError, match="allow_text_evaluation"):
            choice = EnvironmentChoice(name="reasoning_gym", parameters={"dataset": "countdown"})
            await open_scorer(child, [choice], seed=1)
        await open_scorer(child, [ADDITION], seed=1)
        with pytest.raises(ChildFailed, match="open already"):
            await open_scorer(child, [ADDITION], seed=1)
        with pytest.raises(RollmeshError, match="number of an environment"):
            await score(child, 1, item, ["1"])
        assert await score(child, 0, item, [str(item.key["answer"]), "no"]) == (Score(1.0), Score(0.0))
        assert await score(child, 0, item, []) == ()


WARM = """
from rollmesh_protocol.environments.addition import Addition
class Cold(Addition):
    def warm(self, item):
        raise ValueError("this item cannot be made")
def make(parameters, /, *, seed):
    return Cold(low=1, high=2, seed=seed)
"""


async def test_an_item_that_cannot_be_prepared_is_data(tmp_path: Path) -> None:
    (tmp_path / "cold.py").write_text(WARM)
    async with open_child(scorer_spec(python_path=[tmp_path])) as child:
        await open_scorer(child, [EnvironmentChoice(name="cold:make")], seed=1)
        scores = await score(child, 0, Item("?", {"answer": 1}), ["1", "2"])
        assert [one.reward for one in scores] == [0.0, 0.0]
        assert all("ValueError: this item cannot be made" in str(one.error) for one in scores)


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found.append(int(entry.name))
    return found


async def test_death_of_the_zygote_ends_the_scorer_with_words() -> None:
    async with open_child(scorer_spec()) as child:
        await open_scorer(child, [ADDITION], seed=1)
        (parent,) = children_of(child.pid)
        (zygote,) = children_of(parent)
        os.kill(zygote, signal.SIGKILL)
        with pytest.raises(ChildFailed, match="ended with status 4; its last words: the sandbox is gone"):
            await score(child, 0, Item("?", {"answer": 1}), ["1"])


@pytest.mark.parametrize("how", ["scorer", "daemon"])
async def test_nothing_outlives_the_scorer(how: str, tmp_path: Path) -> None:
    daemon = tmp_path / "daemon.py"
    daemon.write_text(
        "import trio\n"
        "from rollmesh_peer.children.process import open_child\n"
        "from rollmesh_peer.children.scoring import EnvironmentChoice, open_scorer, scorer_spec\n"
        "async def main():\n"
        "    async with open_child(scorer_spec()) as child:\n"
        "        await open_scorer(child, [EnvironmentChoice(name='addition')], seed=1)\n"
        "        print(child.pid, flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    process = await trio.lowlevel.open_process([sys.executable, str(daemon)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        scorer = int((await process.stdout.receive_some(100)).decode())
        (parent,) = children_of(scorer)
        (zygote,) = children_of(parent)
        os.kill(process.pid if how == "daemon" else scorer, signal.SIGKILL)
        with trio.fail_after(5):
            while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()
                      for pid in (scorer, parent, zygote)):  # fmt: skip
                await trio.sleep(0.01)
    finally:
        process.kill()
        await process.wait()


async def test_an_answer_shares_no_writable_memory_with_the_zygote() -> None:
    """A fork copies memory on writing, except what is mapped as shared: there an answer could reach its successors."""
    pytest.importorskip("reasoning_gym")
    choice = EnvironmentChoice(name="reasoning_gym", parameters={"dataset": "chain_sum"})
    async with open_child(scorer_spec()) as child:
        await open_scorer(child, [ADDITION, choice], seed=1)
        (parent,) = children_of(child.pid)
        (zygote,) = children_of(parent)
        try:
            lines = Path(f"/proc/{zygote}/maps").read_text().splitlines()
        except PermissionError:
            pytest.skip("this user may not look at a process that cannot be traced")
        rights = [line.split()[1] for line in lines]
        assert "rw-p" in rights and len(rights) > 50
        assert not [line for line, right in zip(lines, rights, strict=True) if right[1] == "w" and right[3] == "s"]


async def test_what_a_missing_layer_leaves_open_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollmesh.children")
    async with open_child(scorer_spec()) as child:
        confinement = await open_scorer(child, [ADDITION], seed=1)
    told = [record.getMessage() for record in caplog.records if record.name == "rollmesh.children"]
    assert str(confinement) in told
    assert [gap for gap in confinement.gaps if not any(gap in line for line in told)] == []
    assert sum("fewer layers" in line for line in told) == len(confinement.gaps)
