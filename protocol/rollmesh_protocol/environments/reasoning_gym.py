"""The procedural data sets of the reasoning-gym package (0.1.25: 106 of them), by name and parameters.

reasoning-gym is imported when an environment is made, never by a daemon. Four things about it shape this module,
all checked by ``tests/unit/environments/test_reasoning_gym.py`` against the installed version:

- Some scorers evaluate the answer as Python, which hands the scoring process to whoever wrote the answer:
  :data:`TEXT_EVALUATING`. They are refused unless the operator sets ``allow_text_evaluation``.
- Some data sets are lists behind the scenes and end (or raise) at their ``size``; so an index is split into a chunk
  of :data:`CHUNK` items and a place in it, and each chunk has a seed of its own.
- ``list_functions`` draws from the process's own random numbers as well: they are seeded for each item, and put back.
- Some draw from Python sets, so that their items change with ``PYTHONHASHSEED``: prompter and scorer run with the
  same fixed value, and a question that cannot be reproduced is an error instead of a wrong reward.

An entry's metadata hold tuples, dates and arrays that plain data cannot carry; so an item's key is its index, and
the entry is made again where it is scored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Final, Protocol

from rollmesh_protocol.environments.interface import Item, Message, draw
from rollmesh_protocol.environments.parameters import Parameters, nearest
from rollmesh_protocol.errors import HostError, UsageError

NAME: Final = "reasoning_gym"

TEXT_EVALUATING: Final[Mapping[str, str]] = {
    "binary_matrix": "eval",
    "composite": "the scorers of other data sets",
    "countdown": "sympy.parse_expr",
    "intermediate_integration": "sympy.parse_expr",
    "n_queens": "eval",
    "polynomial_multiplication": "sympy.parse_expr",
    "puzzle24": "sympy.parse_expr",
    "simple_integration": "sympy.parse_expr",
    "spiral_matrix": "eval",
    "string_insertion": "eval",
}
"""Data sets whose scorer runs the answer's text as code, and with what."""

EVALUATES_ITS_OWN_TEXT: Final[Mapping[str, str]] = {
    "bitwise_arithmetic": "eval of the problem, which the data set wrote itself",
    "number_sorting": "eval of the expected answer, which the data set wrote itself",
    "propositional_logic": "a parse_expr of its own, which evaluates nothing",
}
"""Data sets whose scorer looks as if it did; read and found harmless."""

CHUNK: Final = 500
"""Items under one seed: reasoning-gym's own default size, below every list that its data sets draw from."""
KEPT_CHUNKS: Final = 4
"""Data sets held at a time; making one takes up to 0.3 s (word lists)."""
KEPT_ENTRIES: Final = 16
"""Entries held at a time, so that the answers of a group share one; making one takes up to 0.5 s."""
MAX_ANSWER_CHARS: Final = 64 * 1024
"""Longer answers are cut at the front: some scorers take quadratic time."""

OPEN: Final = "<answer>"
CLOSE: Final = "</answer>"
INSTRUCTION: Final = f"Think step by step if you need to. Put only the final answer between {OPEN} and {CLOSE}."


class DataSet(Protocol):
    """What we use of ``reasoning_gym.dataset.ProceduralDataset``."""

    def __getitem__(self, index: int, /) -> dict[str, object]: ...

    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float: ...


class ReasoningGym:
    """One data set. The answer is what stands between the last pair of answer tags, else the whole text."""

    def __init__(self, dataset: str, parameters: Mapping[str, object], *, instruction: str, seed: int) -> None:
        self._dataset = dataset
        self._parameters = dict(parameters)
        self._instruction = instruction
        self._seed = seed
        self._chunks: dict[int, DataSet] = {}
        self._entries: dict[int, dict[str, object]] = {}
        self._chunk(0)

    @property
    def name(self) -> str:
        return NAME

    def item(self, index: int) -> Item:
        return Item(str(self._entry(index)["question"]), {"index": index})

    def messages(self, item: Item) -> tuple[Message, ...]:
        user: Message = {"role": "user", "content": item.question}
        return ({"role": "system", "content": self._instruction}, user) if self._instruction else (user,)

    def warm(self, item: Item) -> None:
        """Make the entry of ``item``. Raises ``HostError`` when this process makes another one than the prompter's."""
        index = item.key.get("index")
        if not isinstance(index, int) or self._entry(index)["question"] != item.question:
            raise HostError(f"the data set {self._dataset} does not make item {index} again: is PYTHONHASHSEED fixed?")

    def reward(self, item: Item, completion: str) -> float:
        self.warm(item)
        index = item.key["index"]
        assert isinstance(index, int)  # warm has checked it
        score = self._chunk(index // CHUNK).score_answer(extract_answer(completion), self._entry(index))
        value = float(score)
        return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0

    def _entry(self, index: int) -> dict[str, object]:
        if index not in self._entries:
            _make_room(self._entries, KEPT_ENTRIES)
            chunk = self._chunk(index // CHUNK)
            before = random.getstate()
            random.seed(draw(2**31, NAME, self._dataset, self._seed, "item", index))
            try:
                self._entries[index] = chunk[index % CHUNK]
            finally:
                random.setstate(before)
        return self._entries[index]

    def _chunk(self, number: int) -> DataSet:
        if number not in self._chunks:
            _make_room(self._chunks, KEPT_CHUNKS)
            # Not the seed itself, even for chunk 0: reasoning-gym derives the seed of item i as seed + i.
            seed = draw(2**31, NAME, self._dataset, self._seed, number)
            self._chunks[number] = _create(self._dataset, self._parameters, seed=seed)
        return self._chunks[number]


def extract_answer(completion: str) -> str:
    """The text between the last pair of answer tags, or all of it; stripped. Plain searches: no regular expression."""
    end = completion.rfind(CLOSE)
    start = completion.rfind(OPEN, 0, end) if end >= 0 else -1
    answer = completion[start + len(OPEN) : end] if start >= 0 else completion
    return answer.strip()[-MAX_ANSWER_CHARS:]


def make(parameters: Mapping[str, object], /, *, seed: int) -> ReasoningGym:
    """Parameters: ``dataset`` (its name), ``parameters`` (its own, a table), ``instruction`` (the system message; empty
    for none) and ``allow_text_evaluation`` (default false). Raises ``UsageError`` and ``HostError``."""
    read = Parameters(NAME, parameters)
    dataset = read.text("dataset")
    own = read.table("parameters")
    instruction = read.text("instruction", default=INSTRUCTION)
    allow = read.flag("allow_text_evaluation", default=False)
    read.finish()
    known = _known_parameters()
    if dataset not in known:
        raise UsageError(f"reasoning-gym has no data set {dataset!r}{nearest(dataset, known)}")
    if dataset in TEXT_EVALUATING and not allow:
        raise UsageError(
            f"the scorer of the data set {dataset} runs the answer's text as code ({TEXT_EVALUATING[dataset]}), so "
            "whoever wrote the answer also decides its reward; the sandbox holds such code, but not what it says of "
            "itself: set allow_text_evaluation = true in this environment's parameters if you trust every node"
        )
    for name in own:
        if name not in known[dataset]:
            near = nearest(name, known[dataset])
            raise UsageError(f"the data set {dataset} has no parameter {name!r}{near}")
    return ReasoningGym(dataset, own, instruction=instruction, seed=seed)


def _known_parameters() -> dict[str, frozenset[str]]:
    """Every data set with the names of its parameters; ``seed`` and ``size`` are ours."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise HostError(f"the reasoning_gym environment needs the package reasoning-gym 0.1.25 ({error})") from error
    ours = {"seed", "size"}
    return {name: frozenset(config.__dataclass_fields__) - ours for name, (_, config) in DATASETS.items()}


def _create(dataset: str, parameters: Mapping[str, object], *, seed: int) -> DataSet:
    from reasoning_gym.factory import create_dataset

    try:
        made: DataSet = create_dataset(dataset, seed=seed, size=CHUNK, **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(f"the data set {dataset} does not take these parameters: {reason}") from error
    return made


def _make_room(kept: dict[int, DataSet] | dict[int, dict[str, object]], most: int) -> None:
    """Drop the entries that were put in first until there is room for one more."""
    while len(kept) >= most:
        del kept[next(iter(kept))]
