"""What a node says of itself, and what it checks, keeps and shows of the run, before the first download."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollmesh_node.config import NodeConfig
from rollmesh_node.generator import EngineSetting
from rollmesh_node.joining import pin_card
from rollmesh_node.memory import engine_bytes
from rollmesh_node.own_limits import OwnLimits, check_card, check_memory
from rollmesh_peer.folders import private_folder
from rollmesh_peer.free_memory import free_bytes
from rollmesh_peer.logging_setup import event
from rollmesh_peer.status.words import count, size
from rollmesh_protocol import limits
from rollmesh_protocol.messages import MAJOR, Hello, RunCard

CARD: Final = "card"
"""The run card's file in the run's folder."""

RUNS: Final = "runs"
"""The folder of all runs, in the node's folder."""

_log = logging.getLogger(__name__)


def own_limits(config: NodeConfig) -> OwnLimits:
    """The volunteer's limits, in bytes and tokens."""
    return OwnLimits(
        prompt_tokens=config.limits.prompt_tokens,
        new_tokens=config.limits.completion_tokens,
        disk_bytes=int(config.limits.disk_gb * limits.GIB),
        download_bytes=int(config.limits.download_gb * limits.GIB),
    )


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """One node's side of the first conversation with a learner. ``engine`` is None for a seed."""

    config: NodeConfig
    software: str
    folder: Path
    own: OwnLimits
    engine: EngineSetting | None
    invite: bytes | None
    addresses: Callable[[], tuple[str, ...]]

    def hello(self) -> Hello:
        """What we say of ourselves."""
        return Hello(
            majors=(MAJOR,),
            software=self.software,
            name=self.config.node.name,
            role=self.config.node.role,
            engine=self.engine.declared if self.engine is not None else None,
            addresses=self.addresses(),
            invite=self.invite,
        )

    def check(self, card: RunCard) -> None:
        """Hold the volunteer's limits and this machine's memory against the card.

        Raises:
            Refused: ``card.limits`` or ``card.model``.
            HostError: the model does not fit into memory.
        """
        check_card(card, self.own)
        free = free_bytes()
        if self.engine is not None and self.engine.is_model and free is not None:
            needed = engine_bytes(card.layout, on_cpu=self.engine.declared.device == "cpu")
            check_memory(card, free_bytes=free, needed_bytes=needed)

    def pin(self, card: RunCard) -> None:
        """Hold the card against the last time, and keep it: see :func:`~rollmesh_node.joining.pin_card`."""
        pin_card(card, self.run_folder(card) / CARD)

    def show(self, card: RunCard) -> None:
        """Say whose run this is and what it will take."""
        event(
            _log, "joined", run=card.name, learner=card.learner, model=card.model.source,
            parameters=count(card.model.parameters), weights=size(card.layout.image_bytes),
            tasks=", ".join(card.environments),
        )  # fmt: skip

    def run_folder(self, card: RunCard) -> Path:
        """The folder of this run, made if need be."""
        private_folder(self.folder / RUNS)
        return private_folder(run_place(self.folder, learner=card.learner, run=card.run))


def run_place(folder: Path, *, learner: str, run: str) -> Path:
    """Where a node keeps what belongs to a run; a run's id is a stranger's text and never becomes a path."""
    return folder / RUNS / hashlib.blake2b(f"{learner}/{run}".encode(), digest_size=12).hexdigest()
