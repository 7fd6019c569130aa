"""The prompter child: ``python -m rollmesh_learner.work.prompter``. It makes prompts and turns completions into text.

The invariant: prompt number ``index`` is a function of (environments, weights, seed, index) and the model folder, so a
learner that was killed makes the same prompts again. It is a child because tokenizers, templates and environments are
code and memory that the daemon does not want; it never sees an answer's text but to decode it, and scores nothing.

    open     {model_folder, environments: [{name, parameters, weight}], seed}
             -> {stop_tokens: [int], vocabulary, tokenizer_digest: 32 bytes}
    prompt   {index} -> {environment, name, item, prompt_ids: uint32 little-endian, prompt_text}
    prompts  {first, count} -> {prompts: [as above]}
    decode   {completions: [uint32 little-endian]} -> {texts: [str]}

``environment`` is a number in the list that ``open`` was given; ``item`` is what the scorer takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np

from rollmesh_learner.work.model_text import ModelText
from rollmesh_peer.children.child import run_child, take_pipes
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.plugins import fix_hash_seed, load_environment
from rollmesh_protocol.environments.interface import Environment, draw
from rollmesh_protocol.errors import ChildFailed, UsageError

MOST_AT_ONCE: Final = 4096
"""Prompts of one call: some hundred milliseconds of work, some megabytes of answer."""
FINE: Final = 1 << 53
"""Steps of the draw between environments: every weight down to 1e-15 of the whole counts."""


class Mix:
    """Which environment makes prompt number ``index``: drawn by weight, the same for the same seed. Pure."""

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        if not weights or not all(0.0 < weight < float("inf") for weight in weights):
            raise UsageError("a run needs at least one environment, and every weight must be above zero")
        self._bounds = list(accumulate(weights))
        self._seed = seed

    def choose(self, index: int) -> int:
        """The number of an environment."""
        point = draw(FINE, "mix", self._seed, index) / FINE * self._bounds[-1]
        return min(bisect_right(self._bounds, point), len(self._bounds) - 1)


class Prompter:
    """The verbs; :meth:`open` before the others, and once."""

    def __init__(self) -> None:
        self._text: ModelText | None = None
        self._environments: list[Environment] = []
        self._mix: Mix | None = None

    def open(self, body: Body) -> Body:
        """Load the tokenizer and the environments. Raises ``UsageError`` for what the operator can mend."""
        choices, seed = body.get("environments"), body.get("seed")
        if not isinstance(choices, list) or not isinstance(seed, int):
            raise ChildFailed("open needs a model folder, environments and a seed")
        text = ModelText(Path(str(body.get("model_folder"))))
        self._mix = Mix([float(one.get("weight", 1.0)) for one in choices], seed=seed)
        self._environments = [
            load_environment(str(one["name"]), one.get("parameters") or {}, seed=seed) for one in choices
        ]
        self._text = text
        return {
            "stop_tokens": list(text.stop_tokens),
            "vocabulary": text.vocabulary,
            "tokenizer_digest": text.digest,
        }

    def prompt(self, body: Body) -> Body:
        """One prompt."""
        return self._make(_whole(body, "index"))

    def prompts(self, body: Body) -> Body:
        """``count`` prompts in a row, from number ``first`` on."""
        first, count = _whole(body, "first"), _whole(body, "count")
        if count > MOST_AT_ONCE:
            raise ChildFailed(f"at most {MOST_AT_ONCE} prompts at once, not {count}")
        return {"prompts": [self._make(first + place) for place in range(count)]}

    def decode(self, body: Body) -> Body:
        """The texts of completions, in order."""
        completions = body.get("completions")
        if self._text is None or not isinstance(completions, list):
            raise ChildFailed("decode needs an opened prompter and a list of completions")
        return {"texts": self._text.texts([_tokens(completion) for completion in completions])}

    def _make(self, index: int) -> Body:
        if self._text is None or self._mix is None:
            raise ChildFailed("this prompter has not been opened")
        number = self._mix.choose(index)
        environment = self._environments[number]
        item = environment.item(index)
        text, ids = self._text.prompt(environment.messages(item))
        return {
            "environment": number,
            "name": environment.name,
            "item": item.to_plain(),
            "prompt_ids": np.asarray(ids, dtype="<u4").tobytes(),
            "prompt_text": text,
        }


def _whole(body: Mapping[str, object], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ChildFailed(f"{name} must be a whole number from 0 on")
    return value


def _tokens(value: object) -> list[int]:
    if not isinstance(value, bytes) or len(value) % 4:
        raise ChildFailed("a completion must be bytes of uint32")
    tokens: list[int] = np.frombuffer(value, dtype="<u4").tolist()
    return tokens


def main() -> None:
    """Serve the daemon until it goes away."""
    fix_hash_seed()
    take_pipes()
    prompter = Prompter()
    run_child(
        {"open": prompter.open, "prompt": prompter.prompt, "prompts": prompter.prompts, "decode": prompter.decode}
    )


if __name__ == "__main__":
    main()
