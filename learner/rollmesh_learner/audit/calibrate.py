"""Honest rollouts on the operator's own machine: prompts of the run, the node's engine, the learner's auditor.

Every part is the real one in a process of its own. Nothing is kept but margins and log-probabilities.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import trio

from rollmesh_learner import terms
from rollmesh_learner.audit.calibration import Calibration, model_digest
from rollmesh_learner.audit.calibration_cells import CALL_S, SAMPLES, Parts, Tell, bytes_of, fill
from rollmesh_learner.audit.derive import CellData, derive
from rollmesh_learner.base import import_base
from rollmesh_learner.config import LearnerConfig
from rollmesh_learner.crew import PrompterFacts, make_auditor, make_prompter, torch_spec
from rollmesh_peer.children.process import ChildSpec, kept_environment, open_child, python_argv
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, UsageError
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.verdicts.envelope import LIFE_ROLLOUTS, RATE, SOFT_RATE

DEFAULT_ROLLOUTS: Final = 768
"""Some minutes on two cores with a model of 135M; more of them tighten the thresholds."""
LEAST_ROLLOUTS: Final = 24
NEW_TOKENS: Final = 32
"""Longer completions are cut here: rates are kept for the run's length by the formula."""
SHARES: Final = {
    ("bfloat16", 64): 1 / 2, ("bfloat16", 8): 1 / 6, ("bfloat16", 1): 1 / 24,
    ("float32", 64): 1 / 6, ("float32", 8): 1 / 12, ("float32", 1): 1 / 24,
}  # fmt: skip
"""Of all rollouts, by (arithmetic, rows side by side): what is slow gets fewer."""
_ENGINE: Final = "rollmesh_node.engine.host"
_START_S: Final = 120.0


async def calibrate(config: LearnerConfig, *, folder: Path, rollouts: int, tell: Tell) -> Calibration:
    """Measure and derive; ``tell`` hears in plain words how far it is. Nothing is written but a temporary image.

    Raises:
        UsageError: too few rollouts, or the environments' prompts are too long for the run.
        HostError, ChildFailed, Refused: the model cannot be had, or a process could not do its part.
    """
    if rollouts < LEAST_ROLLOUTS:
        raise UsageError(f"at least {LEAST_ROLLOUTS} rollouts are needed to say anything, not {rollouts}")
    tell(f"base model {config.model.source}")
    model = await import_base(config.model)
    digest = await trio.to_thread.run_sync(model_digest, model.path)
    versions: dict[str, str] = {}
    left_out: list[str] = []
    cells: list[CellData] = []
    with tempfile.TemporaryDirectory(prefix="calibration.", dir=folder) as scratch:
        async with _parts(config, model=model, image=Path(scratch) / "base.image", rollouts=rollouts) as parts:
            for dtype in dict.fromkeys(dtype for dtype, _ in SHARES):
                try:
                    cells += await _measure(parts, dtype=dtype, rollouts=rollouts, versions=versions, tell=tell)
                except HostError as error:
                    if not cells:
                        raise
                    left_out.append(f"{dtype}: {error.detail}")
                    tell(f"{dtype} is left out: {error.detail}")
    longest = config.rollouts.max_new_tokens
    found = derive(cells, rules=terms.thresholds(config), longest=longest)
    return Calibration(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        software=f"rollmesh/{metadata.version('rollmesh')}",
        versions=versions,
        model_source=config.model.source,
        model_digest=digest,
        longest_tokens=longest,
        hard_rate_per_life=RATE,
        life_rollouts=LIFE_ROLLOUTS,
        soft_rate_per_rollout=SOFT_RATE,
        low_margin=found.thresholds.low_margin,
        high_margin=found.thresholds.high_margin,
        any_margin=found.thresholds.any_margin,
        drift_clip=found.drift.clip,
        drift_reference=found.drift.reference,
        drift_exponent=found.drift.exponent,
        drift_alarm=found.drift.alarm,
        delta=found.delta,
        cells=tuple(cell.figures() for cell in cells),
        left_out=tuple(left_out),
    )


@asynccontextmanager
async def _parts(config: LearnerConfig, *, model: ModelFolder, image: Path, rollouts: int) -> AsyncIterator[Parts]:
    """The image, the prompts and a running auditor."""
    layout = await _write_image(model, image=image)
    facts = PrompterFacts()
    auditor = make_auditor(config, model_config=model.config, layout=layout)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(auditor.run)
        try:
            prompts = await _make_prompts(config, model=model.path, facts=facts, count=-(-rollouts // SAMPLES))
            await auditor.wait_accepted(deadline_s=CALL_S)
            yield Parts(
                engine_load={
                    "config_json": json.dumps(dict(model.config)),
                    "layout": layout.encode(),
                    "image": str(image),
                    "threads": config.audit.threads,
                    "device": config.audit.device,
                },
                image=image,
                prompts=prompts,
                stop=list(facts.stop_tokens),
                new_tokens=min(NEW_TOKENS, config.rollouts.max_new_tokens),
                auditor=auditor,
            )
        except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _write_image(model: ModelFolder, *, image: Path) -> Layout:
    spec = ChildSpec(
        name="base importer",
        argv=python_argv("rollmesh_peer.models.base"),
        environment=kept_environment(os.environ),
        start_deadline_s=_START_S,
    )
    async with open_child(spec) as child:
        answer = await child.call("image", {"folder": str(model.path), "image": str(image)}, deadline_s=CALL_S)
    return Layout.decode(bytes_of(answer, "layout"), limit=limits.CARD_BYTES)


async def _make_prompts(config: LearnerConfig, *, model: Path, facts: PrompterFacts, count: int) -> list[bytes]:
    """Prompts of the run's environments that are not too long for it, as little-endian uint32."""
    prompter = make_prompter(config, model=model, facts=facts)
    most = 4 * config.rollouts.max_prompt_tokens
    prompts: list[bytes] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(prompter.run)
        await prompter.wait_accepted(deadline_s=CALL_S)
        async with prompter.use() as child:
            answer = await child.call("prompts", {"first": 0, "count": min(count, 4096)}, deadline_s=CALL_S)
        made = answer["prompts"]
        if isinstance(made, list):
            prompts = [prompt for one in made if len(prompt := bytes_of(one, "prompt_ids")) <= most]
        nursery.cancel_scope.cancel()
    if not prompts:
        raise UsageError("no prompt of the run's environments fits into rollouts.max_prompt_tokens")
    return prompts


async def _measure(parts: Parts, *, dtype: str, rollouts: int, versions: dict[str, str], tell: Tell) -> list[CellData]:
    """All cells of one arithmetic, in one engine process."""
    threads = parts.engine_load["threads"]
    cells: list[CellData] = []
    async with open_child(torch_spec("engine", _ENGINE, threads=threads if isinstance(threads, int) else 0)) as engine:
        await engine.call("load", parts.engine_load | {"dtype": dtype}, deadline_s=CALL_S)
        for (arithmetic, batch), share in SHARES.items():
            if arithmetic == dtype:
                cell = CellData(dtype=dtype, batch=batch)
                await fill(cell, parts, engine=engine, count=max(1, round(share * rollouts)), tell=tell)
                cells.append(cell)
        notes = (await engine.call("stats", {}, deadline_s=CALL_S)).get("notes")
    if isinstance(notes, dict):
        versions |= {str(name): str(value) for name, value in notes.items() if name != "dtype"}
    return cells
