"""Statistical tests of the sampler's noise, as p-values with a stated rate of false alarms. Deterministic.

A source is a function (seeds [n], positions [n], width) -> k [n, width], the 24-bit numbers behind the noise of tokens
0 .. width - 1; :func:`reference` is the real one. :func:`battery` draws through it in three layouts, each of which
varies one thing from row to row (position, low half of the seed, high half of the seed), and asks: are tokens drawn as
softmax says; is k uniform; do neighbours (rows, tokens, drawn tokens) know nothing of each other; are the tails as
long as they should be; does each bit of key and counter change half of the bits of the result?

Every p-value is two-sided: too even is as wrong as too uneven. :func:`combined` is Bonferroni's bound, which holds
however the tests depend on each other: of perfect sources, at most a share ``x`` has a combined value below ``x``.
Pairs do not overlap, so that they are independent under the null hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollmesh_protocol import sampling

Source = Callable[[np.ndarray, np.ndarray, int], np.ndarray]

FALSE_ALARMS = 1e-3
"""Of perfect sources, the share that would be called broken."""
WIDTH = 32
"""Tokens of the vocabulary of the drawing tests."""
ROWS = 1 << 13
"""Rows in one block: a seed's positions, or a position's seeds."""
LEAST_EXPECTED = 20.0
"""Cells of a chi-square that expect less are merged."""
LAYOUTS = ("position", "seed", "high half of seed")
TAILS = (6.0, 8.0, 10.0, 12.0, 14.0)
EULER = 0.5772156649015329
LAGS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Finding:
    """One test: its name, how many numbers it looked at, and its two-sided p-value."""

    name: str
    count: int
    p: float


def reference(seeds: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
    """The sampler's own numbers, uint32 [n, width]; ``width`` a multiple of four."""
    return words(seeds, positions, width) >> np.uint32(32 - sampling.K_BITS)


def words(seeds: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
    groups = np.arange(width // sampling.TOKENS_PER_COUNTER, dtype=np.uint64)
    key = (seeds[:, None] & np.uint64(0xFFFFFFFF), seeds[:, None] >> np.uint64(32))
    return sampling.philox4x32((groups[None], positions[:, None], 0, 0), key).reshape(len(seeds), width)


def shapes() -> dict[str, np.ndarray]:
    """Logits over the small vocabulary, float64 that are exact in float32."""
    normal = np.random.default_rng(5).standard_normal(WIDTH).astype(np.float32).astype(np.float64)
    peak, levels = np.zeros(WIDTH), np.zeros(WIDTH)
    peak[7] = 6.0
    levels[::2] = -10.0
    return {"flat": np.zeros(WIDTH), "normal": normal, "steep": normal * 4, "peaked": peak, "two levels": levels}


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


# --- p-values ---------------------------------------------------------------------------------------------------------
def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's statistic; cells are merged, the rarest first, until each expects enough."""
    order = np.argsort(expected, axis=None)
    rare = np.asarray(observed, dtype=np.float64).ravel()[order]
    wanted = np.asarray(expected, dtype=np.float64).ravel()[order]
    if wanted[0] < LEAST_EXPECTED:
        bins = np.floor(np.cumsum(wanted) / LEAST_EXPECTED)
        bins[wanted >= LEAST_EXPECTED] = bins[-1] + 1 + np.arange((wanted >= LEAST_EXPECTED).sum())
        _, place = np.unique(bins, return_inverse=True)
        rare, wanted = np.bincount(place, rare), np.bincount(place, wanted)
    return _upper_gamma(len(wanted) - 1, float(((rare - wanted) ** 2 / wanted).sum()))


def normal_p(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def poisson_p(seen: int, expected: float) -> float:
    at_most = _gammaincc(seen + 1.0, expected)
    at_least = 1.0 if seen == 0 else 1.0 - _gammaincc(float(seen), expected)
    return min(1.0, 2 * min(at_most, at_least))


def combined(findings: Sequence[Finding]) -> float:
    """Bonferroni: the smallest p-value times the number of tests, at most 1."""
    return min(1.0, len(findings) * min(finding.p for finding in findings))


def _upper_gamma(freedom: int, statistic: float) -> float:
    upper = _gammaincc(freedom / 2, statistic / 2)
    return 2 * min(upper, 1 - upper)


def _gammaincc(a: float, x: float) -> float:
    return float(torch.special.gammaincc(torch.tensor(a, dtype=torch.float64), torch.tensor(x, dtype=torch.float64)))


# --- the battery ------------------------------------------------------------------------------------------------------
@dataclass
class _Pairs:
    """Counts of pairs that should be independent: top and low five bits of k, and the noise's covariance."""

    top: np.ndarray = field(default_factory=lambda: np.zeros(1024))
    low: np.ndarray = field(default_factory=lambda: np.zeros(1024))
    product: float = 0.0
    count: int = 0

    def add(self, k: tuple[np.ndarray, np.ndarray], noise: tuple[np.ndarray, np.ndarray]) -> None:
        one, other = (part.ravel().astype(np.int32) for part in k)
        self.top += np.bincount((one >> 19) << 5 | other >> 19, minlength=1024)
        self.low += np.bincount((one & 31) << 5 | other & 31, minlength=1024)
        self.product += float(np.vdot(noise[0] - EULER, noise[1] - EULER))
        self.count += len(one)

    def findings(self, name: str) -> list[Finding]:
        even = np.full(1024, self.count / 1024)
        z = self.product / (math.pi**2 / 6) / math.sqrt(self.count)
        return [
            Finding(f"pairs along {name}: upper bits", self.count, chi_square_p(self.top, even)),
            Finding(f"pairs along {name}: lower bits", self.count, chi_square_p(self.low, even)),
            Finding(f"pairs along {name}: correlation", self.count, normal_p(z)),
        ]


class _Counts:
    """What a battery counts while it draws block after block."""

    def __init__(self) -> None:
        self.shapes = shapes()
        self.rows = 0
        self.cells = {shift: np.zeros(4096) for shift in (12, 6, 0)}
        self.tokens = {name: np.zeros(WIDTH) for name in self.shapes}
        self.along_rows = {layout: _Pairs() for layout in LAYOUTS}
        self.along_tokens = {lag: _Pairs() for lag in LAGS}
        self.drawn = {layout: np.zeros(WIDTH * WIDTH) for layout in LAYOUTS}
        self.tails = dict.fromkeys(TAILS, 0)
        self.ends = [0, 0]

    def add(self, layout: str, k: np.ndarray, *, shift: int) -> None:
        """One block: k [rows, WIDTH]; ``shift`` 0 or 1 moves the pairs of rows by one."""
        noise = sampling.gumbel(k)
        self.rows += len(k)
        for bits in self.cells:
            self.cells[bits] += np.bincount((k >> np.uint32(bits)).ravel() & 4095, minlength=4096)
        for t in TAILS:
            self.tails[t] += int(np.count_nonzero(noise > t))
        self.ends[0] += int(np.count_nonzero(k == 0))
        self.ends[1] += int(np.count_nonzero(k == 2**sampling.K_BITS - 1))
        drawn = {name: (noise + logits).argmax(1) for name, logits in self.shapes.items()}
        for name, tokens in drawn.items():
            self.tokens[name] += np.bincount(tokens, minlength=WIDTH)
        evens, odds = slice(shift, len(k) - shift, 2), slice(shift + 1, len(k) - shift, 2)
        self.along_rows[layout].add((k[evens], k[odds]), (noise[evens], noise[odds]))
        normal = drawn["normal"]
        self.drawn[layout] += np.bincount(normal[evens] * WIDTH + normal[odds], minlength=WIDTH * WIDTH)
        for lag, pairs in self.along_tokens.items():
            at = np.arange(WIDTH)
            first = at[at // lag % 2 == 0]
            first = first[first + lag < WIDTH]
            pairs.add((k[:, first], k[:, first + lag]), (noise[:, first], noise[:, first + lag]))

    def findings(self) -> list[Finding]:
        numbers = self.rows * WIDTH
        found = [
            Finding(f"draws against softmax: {name}", self.rows, chi_square_p(seen, self.rows * softmax(logits)))
            for (name, logits), seen in zip(self.shapes.items(), self.tokens.values(), strict=True)
        ]
        found += [
            Finding(
                f"uniformity: bits {bits} to {bits + 11} of k",
                numbers,
                chi_square_p(cells, np.full(4096, numbers / 4096)),
            )
            for bits, cells in self.cells.items()
        ]
        for layout, pairs in self.along_rows.items():
            found += pairs.findings(layout)
        chances = np.outer(*[softmax(self.shapes["normal"])] * 2)
        for layout, seen in self.drawn.items():
            found.append(
                Finding(f"drawn tokens along {layout}", int(seen.sum()), chi_square_p(seen, seen.sum() * chances))
            )
        for lag, pairs in self.along_tokens.items():
            found += pairs.findings(f"token, {lag} apart")
        for t, seen in self.tails.items():
            found.append(
                Finding(f"noise above {t:g}: {seen}", numbers, poisson_p(seen, numbers * -math.expm1(-math.exp(-t))))
            )
        ends = sum(self.ends)
        found.append(Finding(f"k at either end: {ends}", numbers, poisson_p(ends, numbers * 2.0**-23)))
        return found


def battery(source: Source, *, draws: int, avalanche_inputs: int) -> list[Finding]:
    """Every test over at least ``draws`` rows of :data:`WIDTH` tokens, and so many inputs for each flipped bit."""
    counts = _Counts()
    steps = np.arange(ROWS, dtype=np.uint64)
    for block in range(-(-draws // ROWS)):
        layout = LAYOUTS[block % len(LAYOUTS)]
        turn = np.uint64(block // len(LAYOUTS))
        if layout == "position":
            seeds, positions = np.full(ROWS, turn), steps
        else:
            half = np.uint64(32 if layout == "high half of seed" else 0)
            seeds, positions = (steps + turn * np.uint64(ROWS)) << half, np.full(ROWS, turn)
        counts.add(layout, source(seeds, positions, WIDTH), shift=block // len(LAYOUTS) % 2)
    return counts.findings() + avalanche(source, inputs=avalanche_inputs)


def avalanche(source: Source, *, inputs: int) -> list[Finding]:
    """Flip each bit of the seed and of the position: each bit of each k must change in half of the inputs.

    Sum of z^2 over (flipped bit, bit of k, token), which is chi-square with one degree for each; half of the inputs are
    small numbers, half are random.
    """
    generator = np.random.default_rng(11)
    small = np.arange(inputs // 2, dtype=np.uint64)
    seeds = np.concatenate([small, generator.integers(0, 2**64, inputs - len(small), dtype=np.uint64)])
    positions = np.concatenate([small, generator.integers(0, 2**32, inputs - len(small), dtype=np.uint64)])
    base = source(seeds, positions, 8)
    found = []
    for name, first, last in (("low half of seed", 0, 32), ("high half of seed", 32, 64), ("position", 64, 96)):
        total, cells = 0.0, 0
        for bit in range(first, last):
            flip = np.uint64(1) << np.uint64(bit % 64)
            other = source(seeds, positions ^ flip, 8) if bit >= 64 else source(seeds ^ flip, positions, 8)
            changed = base ^ other
            for place in range(sampling.K_BITS):
                flips = np.count_nonzero((changed >> np.uint32(place)) & 1, axis=0)
                total += float((((flips - inputs / 2) ** 2) / (inputs / 4)).sum())
                cells += len(flips)
        found.append(Finding(f"avalanche of the {name}: {cells} pairs of bits", inputs, _upper_gamma(cells, total)))
    return found


# --- what 24 bits cut -------------------------------------------------------------------------------------------------
def chance_of_the_lighter(gap: float) -> float:
    """The exact chance that, of two tokens, the one with the smaller logit by ``gap`` is drawn, on the lattice of k.

    The true one is 1 / (1 + exp(gap)). Ties, which go to the lower id, are left out: the lighter one is the higher id.
    """
    won = 0
    for start in range(0, 1 << sampling.K_BITS, 1 << 20):
        heavier = -np.log1p(-(np.arange(start, start + (1 << 20)) + 0.5) * 2.0**-sampling.K_BITS)
        bound = -np.expm1(-heavier * math.exp(-gap)) * 2.0**sampling.K_BITS - 0.5  # the lighter one wins with k below
        won += int(np.clip(np.ceil(bound), 0, None).astype(np.int64).sum())
    return won * 2.0 ** (-2 * sampling.K_BITS)


# --- broken sources, which must be seen -------------------------------------------------------------------------------
def broken() -> dict[str, Source]:
    """Sources with one fault each."""
    one = np.uint64(1)

    def correlated(seeds: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
        """Each position's noise leaks into the next one: one bit in eight of the top bit is the last position's."""
        mine, last = reference(seeds, positions, width), reference(seeds, positions - (positions > 0), width)
        leaks = (mine & np.uint32(7)) == 0
        return np.where(leaks, (mine & np.uint32(0x7FFFFF)) | (last & np.uint32(0x800000)), mine)

    return {
        "every second position repeats": lambda s, p, w: reference(s, p & ~one, w),
        "positions leak into the next": correlated,
        "the high half of the seed is ignored": lambda s, p, w: reference(s & np.uint64(0xFFFFFFFF), p, w),
        "seed and position are added": lambda s, p, w: reference(s + p, np.zeros_like(p), w),
        "neighbouring tokens share a number": lambda s, p, w: np.repeat(reference(s, p, w)[:, ::2], 2, axis=1),
        "numbers stop at 99.9 %": lambda s, p, w: (reference(s, p, w) * 0.999).astype(np.uint32),
        "20 bits instead of 24": lambda s, p, w: reference(s, p, w) & np.uint32(0xFFFFF0),
        "one round": _few_rounds,
    }


def _few_rounds(seeds: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
    """Philox with one round of ten."""
    groups = np.arange(width // 4, dtype=np.uint64)[None]
    low, high = (seeds & np.uint64(0xFFFFFFFF))[:, None], (seeds >> np.uint64(32))[:, None]
    product = (groups + 0 * low) * np.uint64(sampling.MULTIPLIERS[0])
    mask = np.uint64(0xFFFFFFFF)
    parts = [positions[:, None] ^ low + 0 * groups, 0 * product, (product >> np.uint64(32)) ^ high, product & mask]
    return (np.stack(parts, axis=-1).reshape(len(seeds), width) & mask).astype(np.uint32) >> np.uint32(8)
