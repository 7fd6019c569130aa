"""What the demo starts, as command lines, and where everything lies. Pure: nothing is started or made here.

Invariant: every command is one that a person could type, and everything that it writes is below ``out``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONFIG: Final = Path("deploy/examples/smollm2-arithmetic.toml")
"""The run of the demo, as anybody would start it; from the root of the repository."""
NODES: Final = ("node-a", "node-b")
LEARNER: Final = "learner"

TRAINER_THREADS: Final = 2
"""The trainer is what the others wait for, and while it trains the nodes have little left to do."""
AUDITOR_THREADS: Final = 1
"""Audits are short and late by nature; a second thread would only take the processor from the trainer."""
NODE_THREADS: Final = 1
"""Two engines of one thread each make 351 tokens a second on two cores; one engine of two threads makes 276."""

LOOPBACK: Final = ["/ip4/127.0.0.1/tcp/0"]
"""Port 0: the system gives one that is free, and the learner's join line tells which."""
PREFIX: Final = "ROLLMESH_"
"""Variables of this name would change the demo without anybody seeing it: the processes do not get them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One demo. Settings are more ``--set`` words, for all that the demo does not settle itself."""

    program: tuple[str, ...]
    """How the ``rollmesh`` command is started."""
    node_program: tuple[str, ...] = ()
    """The same for the nodes, where their engine has an environment of its own; empty: as the learner's."""
    out: Path
    """An absolute path."""
    config: Path = CONFIG
    nodes: tuple[str, ...] = NODES
    learner_settings: tuple[str, ...] = ()
    node_settings: tuple[str, ...] = ()

    @property
    def home(self) -> Path:
        """Where the processes keep what they share: the converted base model and the control sockets."""
        return self.out / "home"

    @property
    def models(self) -> Path:
        """The converted base model, which a later demo uses again."""
        return self.home / "models"

    def folder(self, name: str) -> Path:
        """The state of one process: its key, weights, ledger."""
        return self.out / name

    def log(self, name: str) -> Path:
        """What one process printed."""
        return self.out / f"{name}.log"

    def shown(self, path: Path) -> str:
        """``path`` as short as a person may type it here."""
        here = Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def metrics(self) -> Path:
        """The learner's own file of one line a step."""
        return self.folder(LEARNER) / "metrics.jsonl"

    @property
    def learner_summary(self) -> Path:
        """The learner's own account, which it writes when the run is over."""
        return self.folder(LEARNER) / "summary.json"

    @property
    def products(self) -> tuple[Path, ...]:
        """Everything that a demo leaves behind; only this is removed before the next one."""
        results = ("summary.json", "metrics.jsonl", "reward.png")
        members = (LEARNER, *self.nodes)
        return (self.home, *map(self.folder, members), *map(self.log, members), *(self.out / name for name in results))

    def learner_argv(self) -> tuple[str, ...]:
        """The operator's command."""
        settings = {
            "run.folder": str(self.folder(LEARNER)),
            "network.listen": LOOPBACK,
            "training.threads": TRAINER_THREADS,
            "audit.threads": AUDITOR_THREADS,
        }
        return (*self.program, "learner", "run", str(self.config), *_words(settings, self.learner_settings))

    def node_argv(self, name: str, *, join: str) -> tuple[str, ...]:
        """A volunteer's command."""
        settings = {
            "node.folder": str(self.folder(name)),
            "node.name": name,
            "network.listen": LOOPBACK,
            "engine.threads": NODE_THREADS,
        }
        return (
            *(self.node_program or self.program),
            "node",
            "run",
            "--join",
            join,
            *_words(settings, self.node_settings),
        )

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What the processes see of the environment."""
        kept = {name: value for name, value in inherited.items() if not name.startswith(PREFIX)}
        return kept | {"ROLLMESH_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}


def _words(settings: Mapping[str, object], more: tuple[str, ...]) -> tuple[str, ...]:
    """``--set`` words; the later ones win."""
    own = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    return tuple(word for setting in (*own, *more) for word in ("--set", setting))
