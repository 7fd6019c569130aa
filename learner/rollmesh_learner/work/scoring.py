"""Rewards: every accepted rollout is turned into text and scored, by children, before it counts for anything.

The text of an answer is hostile code to a scorer, so scoring happens in the sandbox child. An environment that raises
or hangs makes one rollout without reward, never a dead run; that is an outcome, and it is written down. Whose answers
come next is decided in :mod:`.turns`. The draw for audit follows from the rewards, and is in the ledger with them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Final

import trio

from rollmesh_learner.audit.drawing import Drawer
from rollmesh_learner.records.ledger import Ledger, Statement
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import StoredRollout
from rollmesh_learner.work.turns import Turn, Turns
from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.score import Score
from rollmesh_peer.children.scoring import score
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.environments.interface import Item
from rollmesh_protocol.errors import ChildFailed, HostError

_log = logging.getLogger("rollmesh.learner.scoring")

_DECODE_S: Final = 60.0
_ROUND_S: Final = 1.0
"""After so long whose turn it is, is asked again."""
_FAILED_S: Final = 2.0
"""What a turn counts for at least that ended with the sandbox: others come first when it is back."""


class Scorer:
    """The loop from accepted to scored. :meth:`wake` it when there is something new."""

    def __init__(
        self,
        *,
        book: Book,
        ledger: Ledger,
        prompter: Supervisor,
        sandbox: Supervisor,
        limits: AnswerLimits,
        drawer: Drawer,
        is_known: Callable[[str], bool],
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._prompter = prompter
        self._sandbox = sandbox
        self._limits = limits
        self._drawer = drawer
        self._is_known = is_known
        self._turns = Turns()
        self._work = trio.Event()
        self.waiting_for = ""

    def wake(self) -> None:
        """There are new rollouts in state ``scoring``."""
        self._work.set()

    async def run(self, on_scored: Callable[[], None]) -> None:
        """Score for ever; ``on_scored`` is called after each round, however it ended."""
        while True:
            turns = self._turns.plan(self._book.unscored(), is_known=self._is_known)
            if not turns:
                self._work = trio.Event()
                if not any(True for _ in self._book.unscored()):
                    await self._work.wait()
                continue
            try:
                await self._round(turns)
            except ChildFailed as error:
                # The supervisor restarts the child; what was not scored is still in the book.
                self.waiting_for = f"scoring waits: {error.detail}"
                _log.warning("%s", self.waiting_for)
                on_scored()  # what was scored before it counts
                await trio.sleep(0.2)
                continue
            self.waiting_for = ""
            on_scored()

    async def _round(self, turns: list[Turn]) -> None:
        async with self._prompter.use() as child:
            completions = [rollout.tokens for turn in turns for rollout in turn]
            decoded = await child.call("decode", {"completions": completions}, deadline_s=_DECODE_S)
        texts = iter(_texts(decoded.get("texts"), expected=len(completions)))
        until = trio.current_time() + _ROUND_S
        for turn in turns:
            pairs = [(rollout, next(texts)) for rollout in turn]
            await self._score([pair for pair in pairs if self._book.rollout(pair[0].key) is not None])
            if trio.current_time() >= until:
                return

    async def _score(self, members: list[tuple[StoredRollout, str]]) -> None:
        """Score answers of one node to one prompt: they share a process, and must trust each other."""
        group = self._book.groups.get(members[0][0].group_id) if members else None
        if group is None:
            return
        node = members[0][0].node
        item = Item.from_plain(json.loads(group.prompt.item))
        started, at_least = trio.current_time(), _FAILED_S
        try:
            scores = await self._scores(group.prompt.environment, item, [text for _, text in members])
            at_least = 0.0
        finally:
            took_s = max(at_least, trio.current_time() - started)
            self._turns.took(node, answers=len(members), seconds=took_s)
        statements: list[Statement] = []
        for (rollout, _), outcome in zip(members, scores, strict=True):
            if outcome.error:
                _log.info("an answer to group %d could not be scored: %s", group.group_id, outcome.error)
            if outcome.is_over_limits:
                self._drawer.over_limits(rollout.key)
            statements += self._book.score(rollout.key, outcome.reward, error=outcome.error)
        group = self._book.groups.get(group.group_id)  # the book may have gone back to a checkpoint meanwhile
        if group is not None:
            statements += self._drawer.decide(group)
        await self._ledger.commit(*statements)

    async def _scores(self, environment: int, item: Item, answers: list[str]) -> tuple[Score, ...]:
        async with self._sandbox.use() as child:
            try:
                return await score(child, environment, item, answers, limits=self._limits)
            except HostError as error:  # the environment does not make the item that was asked: no fault of the node
                _log.warning("%s", error.detail)
                return tuple(Score(0.0, error.detail) for _ in answers)


def _texts(value: object, *, expected: int) -> list[str]:
    if not isinstance(value, list | tuple) or len(value) != expected:
        raise ChildFailed("the prompter answered with the wrong number of texts")
    return [str(text) for text in value]
