"""``rollmesh`` with a trainer that lies: ``python -m tests.support.tripping_learner FIGURE VALUE GROUPS -- COMMAND``.

What follows the dashes is a command that runs ``python -m rollmesh_peer.command``; see :mod:`.tripping_trainer`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rollmesh_learner import crew
from rollmesh_peer.children.process import ChildSpec, python_argv
from rollmesh_peer.command import main

ROOT = Path(__file__).parents[2]


def let_the_trainer_lie(*how: str) -> None:
    """Start another program in place of the trainer."""
    honest = crew.torch_spec

    def spec(name: str, module: str, *, threads: int) -> ChildSpec:
        made = honest(name, module, threads=threads)
        if name != "trainer":
            return made
        argv = (*python_argv("tests.support.tripping_trainer"), *how)
        return replace(made, argv=argv, environment={**made.environment, "PYTHONPATH": str(ROOT)})

    crew.torch_spec = spec  # type: ignore[assignment]


if __name__ == "__main__":
    place = sys.argv.index("--")
    let_the_trainer_lie(*sys.argv[1:place])
    words = sys.argv[place + 1 :]
    sys.exit(main(words[words.index("rollmesh_peer.command") + 1 :]))
