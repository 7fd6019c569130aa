"""Whose answers are scored next: nodes take turns by the time that their answers have cost, those with a record first.

There is one sandbox, and an answer may keep it busy for seconds. It is given away in turns; a turn is answers of one
node to one prompt.

- Nodes that wait come in the order of the time that they have used while they waited; each hands over its own work in
  group order. Who stays away saves nothing up.
- A stranger has no rollout that passed an audit. While others wait, strangers together have :data:`STRANGERS_SHARE` of
  the time, and else all of it.
- The first turn of a node is one answer, the next ones double while they are cheap. After a dear one it is one again:
  nobody waits long for an answer that runs into its limits, and each such node soon waits for all the others.

A new key is a new stranger; how many of them come is bounded by admission. Nothing is refused here. Pure: what a turn
took is told by whoever scores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from rollmesh_learner.work.groups import StoredRollout

STRANGERS_SHARE: Final = 0.25
DEAR_S: Final = 1.0
"""Seconds for an answer above which a turn was dear. Honest ones take milliseconds, a fork included, and some tenths of
a second on a very busy machine."""
MOST_ANSWERS: Final = 16
"""Of one turn: so many share a process."""
MOST_TURNS: Final = 4
"""Of one node in one round."""
MOST_AT_ONCE: Final = 256
"""Rollouts of one round, so that results that arrive meanwhile do not wait for a long queue to be written down."""
MOST_TOKENS: Final = 1 << 19
"""Tokens of one round: their texts fit into one frame to a child also where every token is hundreds of bytes long."""
CREDIT_S: Final = 10.0
"""Time that strangers may have due to them at most."""
KEPT_NODES: Final = 4096

Turn = list[StoredRollout]


@dataclass
class _Use:
    """What a node has cost so far and in its last turn, in seconds, and the answers of its next turn."""

    seconds: float = 0.0
    last_s: float = 0.0
    answers: int = 1


class _Queue:
    """The nodes of one kind that wait, and the least that any of them has used."""

    def __init__(self) -> None:
        self._waiting: frozenset[str] = frozenset()
        self._least = 0.0

    def order(self, nodes: list[str], use: Callable[[str], _Use]) -> list[str]:
        """``nodes`` in the order in which they come. One that did not wait before starts with the least."""
        before = [use(node).seconds for node in nodes if node in self._waiting]
        self._least = max(self._least, min(before, default=self._least))
        for node in nodes:
            if node not in self._waiting:
                use(node).seconds = max(use(node).seconds, self._least)
        self._waiting = frozenset(nodes)
        return sorted(nodes, key=lambda node: use(node).seconds)


class Turns:
    """Plans one round after the other; :meth:`took` after every turn."""

    def __init__(self) -> None:
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self._known, self._strangers = _Queue(), _Queue()
        self._are_apart = False
        """Whether both kinds waited in the last round."""
        self._come_second: frozenset[str] = frozenset()
        self._due_s = 0.0
        """Time that strangers have coming to them; below zero what they had too much."""

    def plan(self, pending: Iterable[StoredRollout], *, is_known: Callable[[str], bool]) -> list[Turn]:
        """The next round of ``pending``, which is in group order; empty only when there is none."""
        work: dict[str, Turn] = {}
        for rollout in pending:
            work.setdefault(rollout.node, []).append(rollout)
        known = self._known.order([node for node in work if is_known(node)], self._use)
        strangers = self._strangers.order([node for node in work if not is_known(node)], self._use)
        self._are_apart = bool(known and strangers)
        self._come_second = frozenset(strangers)
        turns = self._in_order({node: work[node] for node in known or strangers})
        if self._are_apart and self._due_s > 0:
            turns.insert(0, _split(work[strangers[0]], self._use(strangers[0]).answers)[0])
        return _bounded(turns)

    def took(self, node: str, *, answers: int, seconds: float) -> None:
        """A turn of ``node`` is over."""
        use = self._use(node)
        use.seconds += seconds
        use.last_s = seconds
        use.answers = min(MOST_ANSWERS, 2 * use.answers) if seconds <= DEAR_S * answers else 1
        if self._are_apart and node in self._come_second:
            self._due_s -= seconds
        elif self._are_apart:
            self._due_s = min(CREDIT_S, self._due_s + seconds * STRANGERS_SHARE / (1 - STRANGERS_SHARE))

    def _in_order(self, work: dict[str, Turn]) -> list[Turn]:
        """The next turns of nodes that are given in their order, as if each took as long as the node's last one.

        Only those that come before whatever is left out.
        """
        turns: list[tuple[float, Turn]] = []
        end = float("inf")
        for node, rollouts in work.items():
            use = self._use(node)
            split = _split(rollouts, use.answers)
            turns += [(use.seconds + place * use.last_s, turn) for place, turn in enumerate(split)]
            if sum(map(len, split)) < len(rollouts):
                end = min(end, use.seconds + len(split) * use.last_s)
        return [turn for begins, turn in sorted(turns, key=lambda one: one[0]) if begins <= end]

    def _use(self, node: str) -> _Use:
        use = self._uses.setdefault(node, _Use())
        self._uses.move_to_end(node)
        if len(self._uses) > KEPT_NODES:
            self._uses.popitem(last=False)
        return use


def _split(rollouts: Sequence[StoredRollout], answers: int) -> list[Turn]:
    """The first turns of one node's rollouts: at most so many answers of one group each."""
    turns = []
    for _, members in groupby(rollouts, key=lambda rollout: rollout.group_id):
        group = list(members)
        turns += [group[start : start + answers] for start in range(0, len(group), answers)]
        if len(turns) >= MOST_TURNS:
            break
    return turns[:MOST_TURNS]


def _bounded(turns: list[Turn]) -> list[Turn]:
    """As many of the first turns as one round may hold, and at least one rollout."""
    chosen: list[Turn] = []
    num_rollouts = num_tokens = 0
    for turn in turns:
        fitting: Turn = []
        for rollout in turn:
            num_rollouts += 1
            num_tokens += rollout.num_tokens
            if num_rollouts > MOST_AT_ONCE or (num_tokens > MOST_TOKENS and num_rollouts > 1):
                return [*chosen, fitting] if fitting else chosen
            fitting.append(rollout)
        chosen.append(fitting)
    return chosen
