"""An environment for tests: any answer has a reward, and different answers have different ones.

The tiny model writes noise, so a task with a right answer would give every sample the reward zero, no group would
carry gradient, and no weights would ever be published. Here the reward is the share of letters in the answer. A run
names it ``rollmesh_peer.testing.letters:make``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rollmesh_protocol.environments.interface import Item, Message
from rollmesh_protocol.environments.parameters import Parameters

NAME: Final = "rollmesh_peer.testing.letters:make"


class Letters:
    """The share of letters among an answer's characters."""

    def __init__(self, *, raises_every: int) -> None:
        self._raises_every = raises_every

    @property
    def name(self) -> str:
        """The name under which configs ask for it."""
        return NAME

    def item(self, index: int) -> Item:
        """One of ten questions."""
        return Item(f"Write {index % 10} letters.", {"index": index})

    def messages(self, item: Item) -> tuple[Message, ...]:
        """The question as the only message."""
        return ({"role": "user", "content": item.question},)

    def reward(self, item: Item, completion: str) -> float:
        """Letters over characters, 0 for an empty answer; raises for every so many items, as broken scorers do."""
        index = item.key["index"]
        if self._raises_every and isinstance(index, int) and index % self._raises_every == self._raises_every - 1:
            raise RuntimeError("this environment breaks on purpose")
        return sum(character.isalpha() for character in completion) / max(1, len(completion))


def make(parameters: Mapping[str, object], /, *, seed: int) -> Letters:
    """Parameter: ``raises_every``, 0 (never) by default."""
    del seed
    read = Parameters(NAME, parameters)
    raises_every = read.integer("raises_every", default=0, least=0, most=10**6)
    read.finish()
    return Letters(raises_every=raises_every)
