"""Numbers, times and strangers' text in the form in which a terminal shows them. Pure."""

from __future__ import annotations

import unicodedata
from typing import Final

MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400

ABSENT: Final = "-"


def clean(text: str, *, limit: int = 200) -> str:
    """A peer's text without anything that moves a cursor, colours, rings or reorders: one line of plain characters.

    Control, format (bidirectional overrides among them), surrogate and private-use characters become ``?``.
    """
    kept = "".join(
        " " if letter in "\t\n\r" else "?" if unicodedata.category(letter).startswith("C") else letter
        for letter in text[: 4 * limit]
    )
    kept = " ".join(kept.split())
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 5 s``, ``2 h 10 min``, ``4 d 3 h``."""
    whole = int(max(0.0, seconds))
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"


def ago(seconds: float | None) -> str:
    """How long ago, or a dash for never; whole units only, so that a live view does not flicker."""
    if seconds is None:
        return ABSENT
    if seconds < 2:
        return "now"
    if seconds < MINUTE_S:
        return f"{int(seconds)} s ago"
    if seconds < HOUR_S:
        return f"{int(seconds // MINUTE_S)} min ago"
    if seconds < DAY_S:
        return f"{int(seconds // HOUR_S)} h ago"
    return f"{int(seconds // DAY_S)} d ago"


def size(num_bytes: float) -> str:
    """``812 B``, ``3.2 MB``, ``269 MB``: powers of ten, as downloads are counted."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: int) -> str:
    """A count with thin groups: ``12,345``."""
    return f"{number:,}"


def rate(per_s: float) -> str:
    """Tokens a second, or a dash while nothing is generated."""
    return f"{per_s:,.0f}" if per_s >= 0.5 else ABSENT


def share(part: int, whole: int) -> str:
    """``80 %``; a dash of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else ABSENT


def percent(part: int, whole: int) -> str:
    """``3.1 %``, for shares that are small; a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else ABSENT
