"""The daemon's view of the scoring child: how to start it, open it and have answers scored.

The invariant: scoring never fails because of an answer. ``score`` raises ``ChildFailed`` when the child is gone, and
``HostError`` when an environment says that this machine makes other items than the prompter. Every answer gets a reward
in [0, 1], and a reason where the reward is 0 because scoring it failed. The daemon never imports an environment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.process import Child, ChildSpec, python_argv
from rollmesh_peer.children.score import BATCH, Score
from rollmesh_protocol.environments.interface import Item
from rollmesh_protocol.errors import ChildFailed

log = logging.getLogger("rollmesh.children")

OPEN_S: Final = 120.0
"""Importing environments: reasoning-gym takes 1.5 s here, and a cold disk a multiple."""
SLACK_S: Final = 10.0
"""On top of the answers' own deadlines: making the item again and starting processes on a busy machine."""
ENVIRONMENT_VARIABLES: Final[Mapping[str, str]] = {
    "PYTHONHASHSEED": "0",  # some data sets draw from Python sets: prompter and scorer must agree
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # a process with threads cannot leave its namespaces, and a fork has none of them
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
}
"""Everything that a process which runs environments sees."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentChoice:
    """One environment of a run: its name, its parameters and its share of the prompts."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    weight: float = 1.0

    def to_plain(self) -> dict[str, object]:
        return {"name": self.name, "parameters": dict(self.parameters), "weight": self.weight}


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What keeps answers in, as the scoring child found it on this machine; for ``status`` and ``doctor``."""

    active: tuple[str, ...]
    missing: Mapping[str, str]
    """Layer to the reason why it is not active."""
    holes: tuple[str, ...]
    """What a test process could do from inside; empty on every machine with one of namespaces or seccomp."""

    @property
    def gaps(self) -> tuple[str, ...]:
        """What an answer that runs as code could do or try here, because layers are missing; one sentence each."""
        has = set(self.active)
        found = []
        if not has & {"empty root", "landlock"}:
            files = "that is open to everybody" if "other user" in has else "that this user can read"
            found.append(f"it can read every file {files} (neither an empty root nor Landlock)")
        if "seccomp" not in has:
            found.append("it can try every system call of the kernel (no seccomp)")
            if "namespaces" not in has:
                found.append("it can use the network and start processes that outlive it (nor namespaces)")
        elif "namespaces" not in has:
            found.append("seccomp alone keeps it from the network and from other processes (no namespaces)")
        if "limits" not in has:
            found.append("only the clock bounds what it uses (no limits)")
        return tuple(found)

    def __str__(self) -> str:
        held = "answers are held by " + (", ".join(self.active) or "nothing")
        if self.missing:
            held += "; missing: " + ", ".join(f"{name} ({why})" for name, why in self.missing.items())
        return held + (f"; they can still {', '.join(self.holes)}" if self.holes else "")


def scorer_spec(*, python_path: Sequence[Path] = (), nice: int = 0) -> ChildSpec:
    """How to start the scoring child; ``python_path`` are folders with environments that are not installed."""
    path = {"PYTHONPATH": ":".join(str(folder) for folder in python_path)} if python_path else {}
    argv = python_argv("rollmesh_peer.children.scorer")
    return ChildSpec(name="scorer", argv=argv, environment={**ENVIRONMENT_VARIABLES, **path}, nice=nice)


async def open_scorer(
    child: Child,
    choices: Sequence[EnvironmentChoice],
    *,
    seed: int,
    hidden: Iterable[Path] = (),
    limits: AnswerLimits = AnswerLimits(),  # noqa: B008 - frozen
) -> Confinement:
    """Import the environments in the child and lock it up. To be called once, before :func:`score`.

    ``hidden`` are the daemon's own folders (ledger, keys, checkpoints), which must not become readable by way of the
    import path. Raises ``UsageError`` for an environment or parameter that does not exist.
    """
    plain = [choice.to_plain() for choice in choices]
    body = {"environments": plain, "seed": seed, "hidden": [str(path) for path in hidden], **asdict(limits)}
    answer = await child.call("open", body, deadline_s=OPEN_S)
    active, missing, holes = answer.get("active"), answer.get("missing"), answer.get("holes")
    if not isinstance(active, list) or not isinstance(missing, dict) or not isinstance(holes, list):
        raise ChildFailed("the scorer process did not say how it is confined")
    confinement = Confinement(active=tuple(active), missing=missing, holes=tuple(holes))
    log.info("%s", confinement)
    for gap in confinement.gaps:
        log.warning("answers are held by fewer layers than there could be: if one ran as code, %s", gap)
    return confinement


async def score(
    child: Child,
    environment: int,
    item: Item,
    answers: Sequence[str],
    *,
    limits: AnswerLimits = AnswerLimits(),  # noqa: B008 - frozen
) -> tuple[Score, ...]:
    """The scores of ``answers`` to one item, in order. ``environment`` counts in the choices given to the scorer.

    Answers of one call share processes, so a call should hold the answers of one sender.
    """
    # A pipe carries UTF-8: half a surrogate pair, which no tokenizer gives, becomes a question mark.
    texts = [text.encode("utf-8", "replace").decode() for text in answers]
    body = {"environment": environment, "item": item.to_plain(), "answers": texts}
    answer = await child.call("score", body, deadline_s=deadline_s(len(texts), limits))
    rewards, errors = answer.get("rewards"), answer.get("errors")
    if not isinstance(rewards, list) or not isinstance(errors, list) or not len(rewards) == len(errors) == len(answers):
        raise ChildFailed("the scorer process did not answer with one score for each answer")
    return tuple(Score(float(reward), error) for reward, error in zip(rewards, errors, strict=True))


def deadline_s(count: int, limits: AnswerLimits) -> float:
    """Seconds within which so many answers are scored, whatever they do: a batch together, then each answer alone."""
    turns = count + -(-count // BATCH)
    return SLACK_S + turns * (limits.wall_s + 1.0)
