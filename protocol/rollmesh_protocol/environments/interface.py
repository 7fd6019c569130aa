"""The contract of an environment: items by index, messages for the model, a reward for its answer.

The invariant that everything else rests on: an environment is a pure function of (parameters, seed, index) and of the
completion. It reads no clock, no file that may change and no global randomness, so that the learner that issued an
item, a resumed learner, and anyone who checks the run later compute the same prompt and the same reward. It knows
nothing of tokens, models, leases or peers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from rollmesh_protocol.errors import Refused

Message = dict[str, str]
"""A chat message as chat templates take it: ``{"role": "system" | "user" | "assistant", "content": text}``."""

MAX_QUESTION_CHARS: Final = 1 << 20
"""A question longer than this is longer than any prompt that a lease may carry."""
MAX_KEY_DEPTH: Final = 32
"""Nesting of an item's key; deeper structures are a mistake or an attack on whoever reads them."""


@dataclass(frozen=True)
class Item:
    """One task. ``key`` is what scoring needs besides the question: plain data (None, bool, int, float, str, lists,
    maps with text keys), because it is kept in the ledger and sent to the scoring process."""

    question: str
    key: Mapping[str, object]

    def to_plain(self) -> dict[str, object]:
        """For msgpack or JSON; :meth:`from_plain` turns it back."""
        return {"question": self.question, "key": dict(self.key)}

    @classmethod
    def from_plain(cls, plain: object) -> Item:
        """An item from :meth:`to_plain`'s output. Raises ``Refused`` for anything else."""
        if isinstance(plain, Mapping) and set(plain) == {"question", "key"}:
            question, key = plain["question"], plain["key"]
            is_text = isinstance(question, str) and len(question) <= MAX_QUESTION_CHARS
            if is_text and isinstance(key, Mapping) and is_plain(key):
                return cls(question, key)
        raise Refused("request.invalid", "this is not an item of an environment")


class Environment(Protocol):
    """What an environment must be. ``addition.py`` is the example to copy."""

    @property
    def name(self) -> str:
        """The name under which configs ask for it."""

    def item(self, index: int) -> Item:
        """Task number ``index``, 0 and up, without end: the same in every process with these parameters and seed."""

    def messages(self, item: Item) -> tuple[Message, ...]:
        """What the model is shown, before its chat template."""

    def reward(self, item: Item, completion: str) -> float:
        """How good the decoded answer is, in [0, 1]. An exception counts as 0 and is shown beside the reward."""


class WarmEnvironment(Environment, Protocol):
    """An environment that can do the part of scoring that does not touch the answer once for a whole group."""

    def warm(self, item: Item) -> None:
        """Called before the answers to ``item`` are scored, outside of their sandbox, without any of them.

        Raises ``HostError`` when this process makes another item than the one it is given: scoring would be wrong.
        """


class EnvironmentFactory(Protocol):
    """What an entry point of the group ``rollmesh.environments`` names."""

    def __call__(self, parameters: Mapping[str, object], /, *, seed: int) -> Environment:
        """An environment. Raises ``UsageError`` for parameters that it does not know or take."""


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value consists of JSON's types only, with finite numbers and at most ``MAX_KEY_DEPTH`` levels."""
    if depth > MAX_KEY_DEPTH:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    if value is None or isinstance(value, (bool, int, str)):
        return True
    if isinstance(value, (list, tuple)):
        return all(is_plain(element, depth + 1) for element in value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(element, depth + 1) for key, element in value.items())
    return False


def draw(bound: int, *parts: object) -> int:
    """A number in [0, ``bound``), the same for the same ``parts`` on every machine and in every version of Python.

    Uniform up to a bias of ``bound`` / 2^128. ``parts`` are told apart by their ``repr`` and joined unambiguously.
    """
    text = "\x1f".join(repr(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big") % bound
