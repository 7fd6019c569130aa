"""Sums of two small numbers: the demo's environment, and the example to copy for your own.

An environment is a class with ``name``, ``item``, ``messages`` and ``reward``, and a ``make`` that reads its
parameters. Three rules make it fit for a network of strangers:

1. ``item(index)`` depends on nothing but the parameters, the seed and the index (use ``interface.draw``).
2. ``reward`` takes whatever text a stranger sends: bounded work, no evaluation of the text, no exception needed.
3. The key holds plain data; the answer stays in it and never reaches a node.

To publish yours from a package of your own::

    [project.entry-points."rollmesh.environments"]
    my_environment = "my_package.my_module:make"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from rollmesh_protocol.environments.interface import Item, Message, draw
from rollmesh_protocol.environments.parameters import Parameters

NAME: Final = "addition"
MOST: Final = 10**9
"""Largest operand; sums stay far below the digits that :data:`INTEGER` reads."""
INTEGER: Final = re.compile(r"(?<!\d)[-+]?\d{1,18}(?!\d)", re.ASCII)
"""A whole run of 1 to 18 digits; longer runs are ignored. Linear time, and no endless integers."""
READ_CHARS: Final = 64 * 1024
"""Only the end of a longer completion is looked at: the last number counts."""


class Addition:
    """``What is 3 + 4? Answer with a number only.`` The reward is 1 if the last integer of the text is the sum."""

    def __init__(self, *, low: int, high: int, seed: int) -> None:
        self._low = low
        self._high = high
        self._seed = seed

    @property
    def name(self) -> str:
        return NAME

    def item(self, index: int) -> Item:
        """Both operands are uniform in [low, high]."""
        a, b = (self._low + draw(self._high - self._low + 1, NAME, self._seed, index, place) for place in ("a", "b"))
        return Item(f"What is {a} + {b}? Answer with a number only.", {"answer": a + b})

    def messages(self, item: Item) -> tuple[Message, ...]:
        return ({"role": "user", "content": item.question},)

    def reward(self, item: Item, completion: str) -> float:
        return 1.0 if last_integer(completion) == item.key["answer"] else 0.0


def last_integer(text: str) -> int | None:
    """The last whole number in a text, or None. Other scripts' digits and numbers beyond 18 digits do not count."""
    numbers = INTEGER.findall(text[-READ_CHARS:])
    return int(numbers[-1]) if numbers else None


def make(parameters: Mapping[str, object], /, *, seed: int) -> Addition:
    """Parameters: ``low`` and ``high``, the range of both operands (default 1 to 20)."""
    read = Parameters(NAME, parameters)
    low = read.integer("low", default=1, least=-MOST, most=MOST)
    high = read.integer("high", default=20, least=low, most=MOST)
    read.finish()
    return Addition(low=low, high=high, seed=seed)
