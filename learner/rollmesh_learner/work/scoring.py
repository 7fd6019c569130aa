"""Rewards: every accepted rollout is turned into text and scored, by children, before it counts for anything.

The text of an answer is hostile code to a scorer, so scoring happens in the sandbox child. An environment that raises
or hangs makes one rollout without reward, never a dead run; that is an outcome, and it is written down. The draw for
audit follows from the rewards, and is in the ledger with them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Final

import trio

from rollmesh_learner.audit.drawing import Drawer
from rollmesh_learner.records.ledger import Ledger, Statement
from rollmesh_learner.work.book import Book
from rollmesh_learner.work.groups import StoredRollout
from rollmesh_peer.children.confinement import AnswerLimits
from rollmesh_peer.children.score import Score
from rollmesh_peer.children.scoring import score
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.environments.interface import Item
from rollmesh_protocol.errors import ChildFailed, HostError

_log = logging.getLogger("rollmesh.learner.scoring")

_DECODE_S: Final = 60.0
_MOST_AT_ONCE: Final = 256
"""Rollouts of one round, so that results that arrive meanwhile do not wait for a long queue to be written down."""
_MOST_TOKENS: Final = 1 << 19
"""Tokens of one round: their texts fit into one frame to a child also where every token is hundreds of bytes long."""


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
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._prompter = prompter
        self._sandbox = sandbox
        self._limits = limits
        self._drawer = drawer
        self._work = trio.Event()
        self.waiting_for = ""

    def wake(self) -> None:
        """There are new rollouts in state ``scoring``."""
        self._work.set()

    async def run(self, on_scored: Callable[[], None]) -> None:
        """Score for ever; ``on_scored`` is called after each round."""
        while True:
            waiting = one_round(self._book.unscored())
            if not waiting:
                self._work = trio.Event()
                if not any(True for _ in self._book.unscored()):
                    await self._work.wait()
                continue
            try:
                await self._score(waiting)
            except ChildFailed as error:
                # The supervisor restarts the child; what was not scored is still in the book.
                self.waiting_for = f"scoring waits: {error.detail}"
                _log.warning("%s", self.waiting_for)
                await trio.sleep(0.2)
                continue
            self.waiting_for = ""
            on_scored()

    async def _score(self, rollouts: list[StoredRollout]) -> None:
        async with self._prompter.use() as child:
            decoded = await child.call(
                "decode", {"completions": [rollout.tokens for rollout in rollouts]}, deadline_s=_DECODE_S
            )
        texts = _texts(decoded.get("texts"), expected=len(rollouts))
        for group_id, members in _by_group(rollouts, texts):
            group = self._book.groups.get(group_id)
            if group is None:
                continue
            item = Item.from_plain(json.loads(group.prompt.item))
            scores = await self._scores(group.prompt.environment, item, [text for _, text in members])
            statements: list[Statement] = []
            for (rollout, _), outcome in zip(members, scores, strict=True):
                if outcome.error:
                    _log.info("an answer to group %d could not be scored: %s", group_id, outcome.error)
                statements += self._book.score(rollout.key, outcome.reward, error=outcome.error)
            group = self._book.groups.get(group_id)  # the book may have gone back to a checkpoint meanwhile
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


def one_round(pending: Iterable[StoredRollout]) -> list[StoredRollout]:
    """The first rollouts of ``pending`` that are scored together: at least one, and no more than two bounds allow."""
    chosen: list[StoredRollout] = []
    num_tokens = 0
    for rollout in pending:
        num_tokens += rollout.num_tokens
        if chosen and (len(chosen) == _MOST_AT_ONCE or num_tokens > _MOST_TOKENS):
            break
        chosen.append(rollout)
    return chosen


def _by_group(rollouts: list[StoredRollout], texts: list[str]) -> Iterator[tuple[int, list[tuple[StoredRollout, str]]]]:
    """Answers to one item, of one node: those that are scored together share a process, and must trust each other."""
    pairs = sorted(zip(rollouts, texts, strict=True), key=lambda pair: (pair[0].group_id, pair[0].node))
    for (group_id, _), members in groupby(pairs, key=lambda pair: (pair[0].group_id, pair[0].node)):
        yield group_id, list(members)


def _texts(value: object, *, expected: int) -> list[str]:
    if not isinstance(value, list | tuple) or len(value) != expected:
        raise ChildFailed("the prompter answered with the wrong number of texts")
    return [str(text) for text in value]
