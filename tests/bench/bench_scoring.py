"""`make bench-scoring`: what it costs to have an answer scored in the sandbox, against calling the scorer directly.

Through the real pipe: this process, the scorer, its zygote and a fork for each batch of answers, on this machine's
confinement. For each environment, answers right, wrong and long, in calls of 64 and of one: milliseconds of CPU for
each answer (of all those processes, this one included) and on the clock (the best of some turns), beside the same
answers scored in this process in the same run. Rewards must agree. The last line is one JSON object: ``rows``, ``ok``
and ``misses``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from rollmesh_peer.children.child import describe
from rollmesh_peer.children.plugins import fix_hash_seed
from rollmesh_peer.children.process import Child, open_child
from rollmesh_peer.children.score import BATCH
from rollmesh_peer.children.scoring import EnvironmentChoice, open_scorer, score, scorer_spec
from rollmesh_protocol.environments.interface import Environment, Item
from rollmesh_protocol.environments.registry import make_environment

ANSWERS: Final = 64
TURNS: Final = {ANSWERS: 8, 1: 2}
"""By the answers of one call."""
SEED: Final = 3
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
CHOICES: Final = (
    EnvironmentChoice(name="addition"),
    EnvironmentChoice(name="reasoning_gym", parameters={"dataset": "chain_sum"}),
    EnvironmentChoice(name="reasoning_gym", parameters={"dataset": "spell_backward"}),
    EnvironmentChoice(name="reasoning_gym", parameters={"dataset": "mini_sudoku"}),
)


async def measure() -> int:
    """Measure, print a table, and the figures as JSON."""
    rows = []
    async with open_child(scorer_spec()) as child:
        print(await open_scorer(child, CHOICES, seed=SEED), flush=True)
        for number, choice in enumerate(CHOICES):
            environment = make_environment(choice.name, choice.parameters, seed=SEED)
            item = environment.item(5)
            answers = answers_to(item)
            for at_once in (ANSWERS, 1):
                row = {
                    "environment": " ".join([choice.name, *map(str, choice.parameters.values())]),
                    "at_once": at_once,
                }
                row |= await inside(child, number, item, answers, at_once=at_once)
                row |= directly(environment, item, answers)
                row["agree"] = row.pop("inside") == row.pop("outside")
                rows.append(row)
                print(
                    f"{row['environment']:<30} {at_once:>3} a call: {row['cpu_ms']:7.3f} ms of CPU an answer, "
                    f"{row['wall_ms']:7.3f} ms on the clock; directly "
                    f"{row['direct_cpu_ms']:.4f} and {row['direct_wall_ms']:.4f}",
                    flush=True,
                )
    misses = [f"{row['environment']}, {row['at_once']} a call: other rewards" for row in rows if not row["agree"]]
    print(json.dumps({"rows": rows, "answers_in_one_process": BATCH, "ok": not misses, "misses": misses}))
    return 0


def answers_to(item: Item) -> list[str]:
    """As many as a large group holds; one in four is long."""
    reasoning = "Let me think about this step by step. " * 200
    texts = [str(item.key.get("answer", "12")), "no idea", "<answer>7</answer>", f"{reasoning}<answer>12</answer>"]
    return [texts[place % len(texts)] for place in range(ANSWERS)]


async def inside(child: Child, number: int, item: Item, answers: Sequence[str], *, at_once: int) -> dict:
    """Costs of an answer through the pipe, in milliseconds."""
    wall_s, rewards = [], []
    pids = tree(child.pid)
    await score(child, number, item, answers[:at_once])  # makes the item
    cpu_s, own_s = sum(map(cpu_seconds, pids)), time.process_time()
    for _ in range(TURNS[at_once]):
        started = time.perf_counter()
        scores = []
        for start in range(0, len(answers), at_once):
            scores += await score(child, number, item, answers[start : start + at_once])
        wall_s.append(time.perf_counter() - started)
        rewards = [one.error or one.reward for one in scores]
    cpu_s = sum(map(cpu_seconds, pids)) - cpu_s + time.process_time() - own_s
    return {
        "wall_ms": round(min(wall_s) / len(answers) * 1e3, 4),
        "cpu_ms": round(cpu_s / TURNS[at_once] / len(answers) * 1e3, 4),
        "inside": rewards,
    }


def directly(environment: Environment, item: Item, answers: Sequence[str]) -> dict:
    """The same in this process, with nothing around it."""
    wall_s, cpu_s, rewards = [], [], []
    for _ in range(TURNS[ANSWERS]):
        wall, cpu = time.perf_counter(), time.process_time()
        rewards = [_reward(environment, item, answer) for answer in answers]
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    return {
        "direct_wall_ms": round(min(wall_s) / len(answers) * 1e3, 5),
        "direct_cpu_ms": round(min(cpu_s) / len(answers) * 1e3, 5),
        "outside": rewards,
    }


def _reward(environment: Environment, item: Item, answer: str) -> float | str:
    try:
        return float(environment.reward(item, answer))
    except Exception as error:
        return describe(error)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """What a process and its children that have ended have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) * TICK_S


if __name__ == "__main__":
    fix_hash_seed()
    sys.exit(trio.run(measure))
