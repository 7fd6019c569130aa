"""Prompts in advance from a prompter that dies and from environments that raise. On a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast

import trio
import trio.testing

from rollmesh_learner.work.book import Book, Rules
from rollmesh_learner.work.prompting import PromptSource
from rollmesh_peer.children.failure import DIED
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.errors import ChildFailed

RULES = Rules(steps=20, staleness=2, groups_per_step=2, samples_per_group=2)


class Prompter:
    """The child and its supervisor. ``trouble`` raises what asking for an index leads to."""

    def __init__(self, trouble: Callable[[int], None]) -> None:
        self.asked: list[tuple[int, int]] = []
        self._trouble = trouble

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Prompter]:
        yield self

    async def call(self, verb: str, body: Mapping[str, int], *, deadline_s: float) -> dict[str, object]:
        await trio.lowlevel.checkpoint()
        first, count = body["first"], body["count"]
        self.asked.append((first, count))
        for index in range(first, first + count):
            self._trouble(index)
        made = [
            {"environment": 0, "item": {}, "prompt_ids": index.to_bytes(4, "little")}
            for index in range(first, first + count)
        ]
        return {"prompts": made}


async def _use_up(
    trouble: Callable[[int], None], nursery: trio.Nursery, *, count: int
) -> tuple[list[int | None], Prompter]:
    """The first ``count`` prompts, taken as they come; each is the token of its own number."""
    book = Book(RULES)
    prompter = Prompter(trouble)
    source = PromptSource(book=book, prompter=cast(Supervisor, prompter), ahead=16, most_tokens=1)
    nursery.start_soon(source.run)
    taken: list[int | None] = []
    with trio.fail_after(1000):
        while len(taken) < count:
            await trio.sleep(0.1)
            if book.prompts:
                prompt = book.prompts.popleft()
                book.next_group += 1
                taken.append(None if prompt is None else int.from_bytes(prompt.prompt, "little"))
    return taken, prompter


async def test_an_item_that_cannot_be_made_is_passed_over(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    def trouble(index: int) -> None:
        if index in (3, 11):
            raise ChildFailed("the prompter process failed: ValueError: no such item")

    taken, prompter = await _use_up(trouble, nursery, count=40)
    assert taken == [None if index in (3, 11) else index for index in range(40)]
    assert len(prompter.asked) < 30


async def test_a_prompter_that_dies_passes_nothing_over(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    deaths = iter(range(5))

    def trouble(index: int) -> None:
        if next(deaths, None) is not None:
            raise ChildFailed("the prompter process was killed", code=DIED)

    taken, prompter = await _use_up(trouble, nursery, count=16)
    assert taken == list(range(16))
    assert prompter.asked[:6] == [(0, 16)] * 6
