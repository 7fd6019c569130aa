"""The first moments of a run: its name, its card, and version 1. On a restart the same things are found again."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path
from typing import Final

from rollmesh_learner.config import LearnerConfig
from rollmesh_learner.crew import Crew
from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_learner.records import rows
from rollmesh_learner.records.ledger import Ledger, blob, number
from rollmesh_learner.records.restore import published_versions
from rollmesh_peer.models.folder import CONFIG, ModelFolder
from rollmesh_peer.weights.durable import write_file
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, HostError, UsageError
from rollmesh_protocol.messages import ModelReference, RunCard, RunLimits
from rollmesh_protocol.verdicts.judging import Judging

_log = logging.getLogger("rollmesh.learner")

RUN_FILE: Final = "run.id"
_TRIES: Final = 5


async def name_run(ledger: Ledger, config: LearnerConfig, *, folder: Path) -> str:
    """The run's id: the configured name and eight random letters, made once and kept in the ledger.

    It is written into the folder as well, for commands that must not open the ledger while the learner runs.

    Raises:
        HostError: the folder holds a run although the operator asked not to resume one.
    """
    found = await ledger.fetch("SELECT value FROM meta WHERE name = 'run'")
    if found and not config.run.resume:
        raise HostError(f"{folder} already holds a run: choose another run.folder, or set run.resume = true")
    if found:
        run = blob(found[0][0]).decode()
    else:
        run = f"{config.run.name}-{secrets.token_hex(4)}"
        await ledger.commit(rows.put_meta("run", run.encode()))
    write_file(folder / RUN_FILE, run.encode())
    return run


async def begin(ledger: Ledger, publisher: Publisher, hands: Crew, *, exports: Path) -> bytes:
    """Bring the publisher to where the ledger says it was; publish the base as the first version of a new run.

    Returns the root of the base weights. Children that die on the way are replaced and asked again.

    Raises:
        HostError: disk or memory have no room.
        ChildFailed: a child died again and again.
    """
    for left in reversed(range(_TRIES)):
        try:
            return await _begin(ledger, publisher, hands, exports=exports)
        except ChildFailed as error:
            if not left:
                raise
            _log.warning("the run cannot begin yet: %s", error.detail)
    raise AssertionError("unreachable")


async def _begin(ledger: Ledger, publisher: Publisher, hands: Crew, *, exports: Path) -> bytes:
    published = await published_versions(ledger)
    await publisher.restore([version.head for version in published])
    found = await ledger.fetch("SELECT value FROM meta WHERE name = 'base_root'")
    if found and publisher.head.version:
        return blob(found[0][0])
    # A new run, or one whose published weights are gone from the disk: begin again with a whole image.
    image = exports / "base.image"
    life, step = hands.trainer.life, hands.trainer.opened_at_step
    await hands.trainer.export(image, life=life)
    ((highest,),) = await ledger.fetch("SELECT coalesce(max(version), 0) FROM versions")
    version = number(highest) + 1
    await ledger.commit(rows.reserve_version(version, step=step, wall_time=time.time()))
    header = await publisher.publish_base(image, version=version, step=step)
    image.unlink(missing_ok=True)
    statements = [rows.version_published(header)]
    if not found:
        statements.append(rows.put_meta("base_root", header.root))
    await ledger.commit(*statements)
    return blob(found[0][0]) if found else header.root


def make_card(
    config: LearnerConfig,
    *,
    run: str,
    learner: str,
    model: ModelFolder,
    base_root: bytes,
    hands: Crew,
    judging: Judging,
) -> RunCard:
    """What a node is told on joining. All but ``judging`` stays as it is for the life of the run."""
    raw = (model.path / CONFIG).read_bytes()
    if len(raw) > limits.MAX_MODEL_CONFIG_BYTES:
        raise UsageError(f"{model.path / CONFIG} has {len(raw)} bytes; {limits.MAX_MODEL_CONFIG_BYTES} are allowed")
    return RunCard(
        run=run,
        name=config.run.name,
        learner=learner,
        model=ModelReference(
            source=shown_source(config.model.source),
            parameters=hands.parameters,
            base_root=base_root,
            config=raw,
        ),
        layout=hands.layout,
        vocabulary=hands.vocabulary,
        stop_tokens=hands.facts.stop_tokens,
        tokenizer_digest=hands.facts.digest,
        environments=tuple(environment.name for environment in config.environments),
        limits=RunLimits(
            prompt_tokens=config.rollouts.max_prompt_tokens,
            new_tokens=config.rollouts.max_new_tokens,
            samples_per_group=config.rollouts.samples_per_group,
        ),
        swap_modes=config.leases.swap_modes,
        checks=judging.as_checks,
    )


def shown_source(source: str) -> str:
    """The base model as nodes are told of it; of a local folder only the last part, which is nobody else's business."""
    return source if source.startswith(("gguf:", "hub:")) else Path(source).name
