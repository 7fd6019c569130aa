"""``calibration.json``: what was measured and what follows from it; and what a learner takes from it at its start.

Invariants: the file is there whole or not at all; one that was made with other base weights is refused; what the
operator has set by hand wins over what was measured.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final, Literal

import trio
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollmesh_learner.config import LearnerConfig
from rollmesh_peer.models.folder import CONFIG, ModelFolder
from rollmesh_peer.weights.durable import write_file
from rollmesh_protocol.errors import HostError, UsageError
from rollmesh_protocol.verdicts.drift import DriftTest

_log = logging.getLogger("rollmesh.learner.calibration")

FILE: Final = "calibration.json"
MARGINS: Final = ("low_margin", "high_margin", "any_margin")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class CellFigures(_Record):
    """One way of generating: arithmetic and rows side by side."""

    dtype: str
    batch: int
    rollouts: int
    tokens: int
    prompt_tokens: int
    nats_per_token: float
    exact_share: float
    """Tokens that the auditor's kernels draw as well."""
    mean_margin: float
    largest_margin: float
    gap_median: float
    """Of |claimed - own log-probability|, nats."""
    gap_p999: float


class Calibration(_Record):
    """The whole file. Margins, clip, reference and delta in nats."""

    format: Literal[1] = 1
    made_at: str
    software: str
    versions: dict[str, str]
    """Of the engine: device, threads and libraries."""
    model_source: str
    model_digest: str
    """blake3 of the base model's config and weight files."""
    longest_tokens: int
    """Completions of up to so many tokens hold the rates."""
    hard_rate_per_life: float
    life_rollouts: int
    soft_rate_per_rollout: float
    low_margin: float = Field(gt=0, le=100)
    high_margin: float = Field(gt=0, le=100)
    any_margin: float = Field(gt=0, le=100)
    drift_clip: float = Field(gt=0, le=100)
    drift_reference: float = Field(gt=0, le=100)
    drift_exponent: float = Field(ge=0, le=1000)
    """0 where there were too few rollouts: the test then never alarms."""
    drift_alarm: float = Field(gt=0, le=1000)
    delta: float = Field(gt=0, le=10)
    cells: tuple[CellFigures, ...]
    left_out: tuple[str, ...] = ()
    """Cells that this machine cannot do, and why."""

    @property
    def drift(self) -> DriftTest:
        """The sequential test."""
        return DriftTest(
            clip=self.drift_clip, reference=self.drift_reference, exponent=self.drift_exponent, alarm=self.drift_alarm
        )

    def apply_to(self, config: LearnerConfig) -> LearnerConfig:
        """``config`` with what was measured, except where the operator has set something else."""
        margins = {name: getattr(self, name) for name in MARGINS if name not in config.audit.model_fields_set}
        training = {} if "delta" in config.training.model_fields_set else {"delta": self.delta}
        return config.model_copy(
            update={
                "audit": config.audit.model_copy(update=margins),
                "training": config.training.model_copy(update=training),
            }
        )


def write_calibration(calibration: Calibration, *, folder: Path) -> Path:
    """Put the file into the run's folder; ``HostError`` when the disk refuses."""
    path = folder / FILE
    write_file(path, (json.dumps(calibration.model_dump(), indent=2) + "\n").encode())
    return path


def read_calibration(folder: Path) -> Calibration | None:
    """The run's calibration; None where there is none, ``UsageError`` for a file that is none."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return Calibration.model_validate_json(text)
    except (ValidationError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is no calibration of this version of rollmesh: calibrate again, or delete it"
        ) from error


async def adopt(config: LearnerConfig, *, folder: Path, model: ModelFolder) -> tuple[LearnerConfig, DriftTest | None]:
    """The configuration and the drift test that a learner goes by: the run's calibration, where there is one.

    Raises ``UsageError`` for a calibration of another model.
    """
    found = read_calibration(folder)
    if found is None:
        _log.info(
            "the run has no %s: margins are judged by the defaults, and drifts that no single rollout shows are not "
            "looked for (rollmesh learner calibrate CONFIG measures them)", FILE,
        )  # fmt: skip
        return config, None
    if found.model_digest != await trio.to_thread.run_sync(model_digest, model.path):
        raise UsageError(
            f"{folder / FILE} was made with another model ({found.model_source}): calibrate again, or delete it"
        )
    adopted = found.apply_to(config)
    audit = adopted.audit
    _log.info(
        "calibrated on %s: margins %.2f / %.2f / %.2f, delta %.2f nats",
        found.made_at, audit.low_margin, audit.high_margin, audit.any_margin, adopted.training.delta,
    )  # fmt: skip
    return adopted, found.drift


def model_digest(folder: Path) -> str:
    """blake3 of a model folder's config and weight files: hex."""
    hasher = blake3()
    for path in (folder / CONFIG, *sorted(folder.glob("*.safetensors"))):
        hasher.update(f"{path.name} {path.stat().st_size}\n".encode())
        hasher.update_mmap(path)
    return hasher.hexdigest()
