"""Prompts made in advance: group ids are indices into the environments' streams of items, so none is used twice.

An item that its environment cannot make is passed over: it costs its number and a second, never the run.
"""

from __future__ import annotations

import json
import logging
from typing import Final

import trio

from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import Prompt
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.errors import ChildFailed, HostError
from rollmesh_protocol.lease import TOKEN_DTYPE

_log = logging.getLogger("rollmesh.learner.prompting")

_PROMPTS_S: Final = 120.0
_LOOK_S: Final = 0.1
_AGAIN_S: Final = 1.0


class PromptSource:
    """Keeps ``ahead`` prompts ready in the book, made by the prompter child."""

    def __init__(self, *, book: Book, prompter: Supervisor, ahead: int, most_tokens: int) -> None:
        self._book = book
        self._prompter = prompter
        self._ahead = ahead
        self._most_tokens = most_tokens
        self.waiting_for = ""

    async def run(self) -> None:
        """Refill for ever."""
        most = self._ahead
        while True:
            missing = self._ahead - len(self._book.prompts)
            if missing <= self._ahead // 2:
                await trio.sleep(_LOOK_S)
                continue
            first, count = self._book.next_group + len(self._book.prompts), min(missing, most)
            try:
                prompts = await self._make(first, count)
            except (ChildFailed, HostError) as error:
                self.waiting_for = f"prompts wait: {error.detail}"
                _log.warning("%s", self.waiting_for)
                await trio.sleep(_AGAIN_S)
                if error.code not in (ChildFailed.default_code, HostError.default_code):
                    continue  # the prompter died; it is the next one's turn
                if count > 1:  # an environment raised, and it is not told at which item
                    most = count // 2
                    continue
                _log.warning("prompt %d is passed over: its environment cannot make it", first)
                prompts = [None]
            most = min(2 * most, self._ahead)
            self.waiting_for = ""
            if first == self._book.next_group + len(self._book.prompts):  # else the book was rewound meanwhile
                self._book.prompts.extend(prompts)

    async def _make(self, first: int, count: int) -> list[Prompt | None]:
        async with self._prompter.use() as child:
            answer = await child.call("prompts", {"first": first, "count": count}, deadline_s=_PROMPTS_S)
        made = answer.get("prompts")
        if not isinstance(made, list | tuple) or len(made) != count:
            raise ChildFailed("the prompter answered with the wrong number of prompts")
        return [self._unless_too_long(first + place, _read(item)) for place, item in enumerate(made)]

    def _unless_too_long(self, index: int, prompt: Prompt) -> Prompt | None:
        tokens = len(prompt.prompt) // TOKEN_DTYPE.itemsize
        if tokens <= self._most_tokens:
            return prompt
        _log.info("prompt %d is passed over: it has %d tokens, where %d are allowed", index, tokens, self._most_tokens)
        return None


def _read(item: Body) -> Prompt:
    environment, prompt_ids = item["environment"], item["prompt_ids"]
    if not isinstance(environment, int) or not isinstance(prompt_ids, bytes):
        raise ChildFailed("the prompter answered with something that is no prompt")
    return Prompt(environment=environment, item=json.dumps(item["item"]), prompt=prompt_ids)
