"""The prefill of rows that join a decode: every token that some row has already computed is copied, not computed.

Rows that begin with the same tokens are one source, computed once. The first source of a group copies what it shares
with another group that is in flight or joins along with it (a system prompt, a template); the other sources of the
group, which differ in what had begun, copy from the first. So sources come in up to three waves. Of a wave, similar
lengths are computed together, padded on the right, where nobody looks; long ones in pieces.

Invariant: a query sees the keys up to its own position, all of its own sequence.

Not here: which rows join, and the decode (:mod:`.decoding`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh_node.engine.backend import Stats
from rollmesh_node.engine.kv_cache import RowCache
from rollmesh_node.engine.passes import Passes
from rollmesh_node.engine.rows import Row

MIN_SHARED_PREFIX: Final = 16
"""Tokens; below that, another wave costs more than it saves."""
PIECE_TOKENS: Final = {"cpu": 1024}
"""Of one pass, padding included: work of a second or so, after which the host looks at its pipe."""
PIECE_TOKENS_ELSEWHERE: Final = 8192
MASK_ELEMENTS: Final = 1 << 26
"""Of one mask (128 MiB in bf16)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Tokens that one row, or several, begin with."""

    tokens: NDArray[np.int64]
    rows: tuple[int, ...]
    """Their places in the decode."""
    donor: int = 0
    """The row that has the first ``shared`` tokens."""
    shared: int = 0
    wave: int = 0

    @property
    def own(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.shared


def plan(joining: Mapping[int, Row], live: Mapping[int, Row]) -> list[Source]:
    """Return what to compute for ``joining`` beside ``live`` (both by place), earlier waves first."""
    together: dict[tuple[int, bytes], list[int]] = {}
    for place, row in sorted(joining.items(), key=lambda item: len(item[1].start)):
        together.setdefault((row.group.key, row.sample.begun.tobytes()), []).append(place)
    firsts: dict[int, Source] = {}
    for place, row in live.items():
        firsts.setdefault(row.group.key, Source(tokens=row.start, rows=(place,), wave=-1))
    sources = []
    for (key, _), places in together.items():
        tokens = joining[places[0]].start
        donors = [firsts[key]] if key in firsts else [first for first in firsts.values() if first.wave < 1]
        source = _source(tokens, tuple(places), donors)
        firsts.setdefault(key, source)
        sources.append(source)
    return sorted(sources, key=lambda source: (source.wave, source.own))


def _source(tokens: NDArray[np.int64], places: tuple[int, ...], donors: Sequence[Source]) -> Source:
    best, shared = None, MIN_SHARED_PREFIX - 1
    for donor in donors:
        common = _common(tokens[:-1], donor.tokens)  # the last one is computed: its logits are wanted
        if common > shared:
            best, shared = donor, common
    if best is None:
        return Source(tokens=tokens, rows=places)
    return Source(tokens=tokens, rows=places, donor=best.rows[0], shared=shared, wave=best.wave + 1)


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def portions(sources: Sequence[Source], *, tokens: int) -> list[list[Source]]:
    """Split a plan into what is computed at once: one wave, at most ``tokens`` with the padding, or one source."""
    found: list[list[Source]] = []
    for source in sources:
        last = found[-1] if found else []
        if last and last[0].wave == source.wave and source.own * (len(last) + 1) <= tokens:
            last.append(source)
        else:
            found.append([source])
    return found


def piece_tokens(device: torch.device) -> int:
    """Return the tokens of one pass on a device."""
    return PIECE_TOKENS.get(device.type, PIECE_TOKENS_ELSEWHERE)


def fill(passes: Passes, sources: Sequence[Source], *, cache: RowCache, stats: Stats) -> Iterator[Tensor | None]:
    """Compute a portion into ``cache``, which has room; an item for each pass, the last one the logits [sources, V]."""
    started = time.perf_counter()
    starts = torch.tensor([source.shared for source in sources])[:, None]
    own = torch.tensor([source.own for source in sources])
    ids = torch.zeros(len(sources), int(own.max()), dtype=torch.int64)
    for row, source in enumerate(sources):
        ids[row, : source.own] = torch.from_numpy(source.tokens[source.shared :])
    scratch = _scratch(sources, cache)
    piece = max(1, min(piece_tokens(passes.device), MASK_ELEMENTS // scratch.columns) // len(sources))
    last: dict[int, Tensor] = {}
    for begin in range(0, ids.shape[1], piece):
        some = torch.arange(begin, min(begin + piece, ids.shape[1]))
        states = passes.extend(ids[:, some], columns=starts + some, cache=scratch)
        stats.prompt_tokens += int((own - begin).clamp(0, len(some)).sum())
        for row in torch.nonzero((own > begin) & (own <= begin + len(some)))[:, 0].tolist():
            last[row] = states[row, own[row] - 1 - begin]
        if len(last) < len(sources):
            stats.prefill_s += time.perf_counter() - started
            yield None
            started = time.perf_counter()
    pairs = [(row, place) for row, source in enumerate(sources) for place in source.rows]
    cache.copy(pairs, columns=max(len(source.tokens) for source in sources), source=scratch)
    logits = passes.logits(torch.stack([last[row] for row in range(len(sources))]))
    stats.prefill_s += time.perf_counter() - started
    yield logits


def _scratch(sources: Sequence[Source], cache: RowCache) -> RowCache:
    """A cache of a row for each source, with what donors give; wide enough for the padding as well."""
    shared = max(source.shared for source in sources)
    columns = shared + max(source.own for source in sources)
    scratch = RowCache(layers=len(cache.layers), rows=len(sources), columns=columns)
    if donors := [(source.donor, row) for row, source in enumerate(sources) if source.shared]:
        scratch.copy(donors, columns=shared, source=cache)
    return scratch
