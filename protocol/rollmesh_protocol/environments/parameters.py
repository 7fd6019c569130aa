"""Reads the parameters of an environment: types, ranges, and nearest names for a key that nobody knows. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from rollmesh_protocol.errors import UsageError


def nearest(word: str, known: Iterable[str]) -> str:
    """A continuation of a sentence that helps: ``; did you mean a or b?``, or all the names where none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    if not names:
        return "; there are none"
    return f"; known: {', '.join(names)}" if len(names) <= 12 else f"; there are {len(names)}, such as {names[0]}"


class Parameters:
    """The parameters that a config gives an environment. Read each once, then call :meth:`finish`."""

    def __init__(self, environment: str, given: Mapping[str, object]) -> None:
        self._environment = environment
        self._given = dict(given)
        self._known: set[str] = set()

    def integer(self, name: str, *, default: int, least: int, most: int) -> int:
        """A whole number in [least, most]."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "must be a whole number")
        if not least <= value <= most:
            raise self._wrong(name, value, f"must be from {least} to {most}")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """A text; one without a default must be given."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "must be a text")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "must be true or false")
        return value

    def table(self, name: str) -> dict[str, object]:
        """A table (TOML) or map with text keys; empty when it is not given."""
        value = self._take(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self._wrong(name, value, "must be a table")
        return dict(value)

    def finish(self) -> None:
        """Refuse whatever was given and not read."""
        for name in self._given:
            if name not in self._known:
                raise UsageError(
                    f"the environment {self._environment} has no parameter {name!r}{nearest(name, self._known)}"
                )

    def _take(self, name: str, default: object) -> object:
        self._known.add(name)
        return self._given.get(name, default)

    def _wrong(self, name: str, value: object, rule: str) -> UsageError:
        given = "it is missing" if value is None else f"not {value!r:.80}"
        return UsageError(f"the parameter {name!r} of the environment {self._environment} {rule}, {given}")
