"""Captured steps for the patch benchmarks, the bound that they are measured against, and what others would send."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from rollmesh_protocol import limits
from rollmesh_protocol.layout import Layout
from tests.bench.capture_steps import LAYOUT, SERIES, STEPS


class _LargeLayout(Layout):
    max_items = limits.MAX_CARD_ITEMS


@dataclass(frozen=True)
class Step:
    """Two consecutive bf16 images as words, uint16 [image_bytes / 2]."""

    name: str
    old: np.ndarray
    new: np.ndarray


def layout_of(folder: Path) -> Layout:
    """The layout of every captured image."""
    return _LargeLayout.decode((folder / LAYOUT).read_bytes(), limit=limits.CARD_BYTES)


def names() -> list[tuple[str, int]]:
    """Every captured step: its series and its number."""
    return [(series.name, step) for series in SERIES for step in STEPS]


def load(folder: Path, name: str, number: int) -> Step:
    """One captured step."""
    series = next(series for series in SERIES if series.name == name)
    old = np.fromfile(series.before(folder, number), np.uint8)
    frame = series.change(folder, number).read_bytes()
    change = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame, max_output_size=len(old)), np.uint8)
    return Step(f"{name} step {number}", old.view("<u2"), (old ^ change).view("<u2"))


# --- the bound -------------------------------------------------------------------------------------------------------
def ordered(words: np.ndarray) -> np.ndarray:
    """bf16 words in the order of the numbers that they stand for, int64."""
    return np.where(words & 0x8000, words ^ 0xFFFF, words | 0x8000).astype(np.int64)


def entropy_bytes(counts: np.ndarray) -> float:
    """What so many symbols of each kind take under their own distribution."""
    counts = counts[counts > 0].astype(float)
    return float((counts * np.log2(counts.sum() / counts)).sum()) / 8 if counts.size else 0.0


def exponent_bound_bytes(step: Step) -> float:
    """Per exponent of the old value: the entropy of changed or not, and of the step. Over all tensors together."""
    where = np.flatnonzero(step.old != step.new)
    totals = np.bincount((step.old >> 7) & 255, minlength=256)
    exponents = (step.old[where] >> 7) & 255
    steps = ordered(step.new[where]) - ordered(step.old[where])
    bound = 0.0
    for exponent in np.unique(exponents):
        chosen = steps[exponents == exponent]
        bound += entropy_bytes(np.array([len(chosen), totals[exponent] - len(chosen)]))
        bound += entropy_bytes(np.unique(chosen, return_counts=True)[1])
    return bound


# --- what others send ------------------------------------------------------------------------------------------------
def zstd_bytes(data: np.ndarray | bytes, level: int = 1) -> int:
    """The length of one frame."""
    raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    return len(zstandard.ZstdCompressor(level=level).compress(raw))


def u8_gaps(gaps: np.ndarray) -> np.ndarray:
    """Gaps as bytes, 255 for 255 more."""
    escapes = gaps // 255
    stream = np.full(len(gaps) + int(escapes.sum()), 255, dtype=np.uint8)
    stream[np.arange(len(gaps)) + np.cumsum(escapes)] = gaps - 255 * escapes
    return stream


def other_encodings(step: Step) -> dict[str, int]:
    """Bytes of the same step in the encodings of other systems, and of this project's first version."""
    where = np.flatnonzero(step.old != step.new)
    gaps = np.diff(where, prepend=-1) - 1
    new, flips = step.new[where], step.old[where] ^ step.new[where]
    steps = ordered(step.new[where]) - ordered(step.old[where])
    escapes = int((gaps // 65535).sum())
    wide = zstd_bytes(np.minimum(gaps, 65535).astype("<u2")) + 2 * escapes
    return {
        "int32 index + bf16 value": 6 * len(where),
        "dense XOR, zstd-1": zstd_bytes(step.old ^ step.new),
        "u16 gap + absolute value, zstd-1": wide + zstd_bytes(new),
        "u16 gap + XOR value, zstd-1": wide + zstd_bytes(flips),
        "u8-escape gap + signed step, zstd-1": zstd_bytes(u8_gaps(gaps)) + zstd_bytes(steps.astype("<i2")),
    }
