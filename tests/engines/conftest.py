"""The backends under test, each started once: an engine of vLLM takes a quarter of a minute to start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rollmesh_node.engine.backend import Backend, Weights
from rollmesh_node.engine.scripted_backend import ScriptedBackend
from rollmesh_node.engine.transformers_backend import TransformersBackend
from rollmesh_protocol.errors import ChildFailed
from tests.engines.judge import SCRIPT, Judge, ModelJudge, ScriptedJudge
from tests.engines.models import Pair, make_pair
from tests.engines.reference import ReferenceBackend

torch.set_num_threads(1)


def _vllm() -> Backend:
    from rollmesh_node.engine.vllm_backend import VllmBackend

    return VllmBackend(threads=1, max_rows=32, device="auto", cache_bytes=64 * 2**20, enforce_eager=True)


MAKERS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "scripted": lambda: ScriptedBackend(SCRIPT),
    "transformers": lambda: TransformersBackend(threads=1, max_rows=7, device="cpu", dtype="float32"),
    "transformers-bf16": lambda: TransformersBackend(threads=1, max_rows=16, device="cpu"),
    "vllm": _vllm,
}
MODELS = [name for name in MAKERS if name != "scripted"]
"""Backends that compute a model."""


def params(names):
    """The names as parameters; vLLM's runs only where vLLM is."""
    return [pytest.param(name, marks=pytest.mark.vllm if name == "vllm" else ()) for name in names]


@dataclass
class Subject:
    """One backend, and who knows what it has to draw."""

    name: str
    backend: Backend
    pair: Pair
    judges: dict[Path, Judge]
    holds: Weights | None = None

    @property
    def is_model(self) -> bool:
        return self.name != "scripted"

    @property
    def judge(self) -> Judge:
        """Of the weights that it holds."""
        assert self.holds is not None
        return self.judge_of(self.holds)

    def judge_of(self, weights: Weights) -> Judge:
        if weights.image not in self.judges:
            self.judges[weights.image] = (
                ModelJudge(
                    weights,
                    dtype="float32" if self.name in {"reference", "transformers"} else "bfloat16",
                    routed=weights.config["model_type"] == "qwen3_moe",
                )
                if self.is_model
                else ScriptedJudge(weights)
            )
        return self.judges[weights.image]

    def load(self, weights: Weights) -> None:
        self.holds = None
        self.backend.load(weights)
        self.holds = weights

    def swap(self, weights: Weights) -> None:
        self.swap_to(weights.image)
        self.holds = weights

    def swap_to(self, image: Path) -> None:
        """Swap to what may not be an image at all."""
        self.holds = None
        self.backend.swap(image)

    def run(self, requests):
        """Add, and step until nothing is in flight."""
        self.backend.add(requests)
        return self.rest()

    def rest(self):
        rollouts = []
        while self.backend.in_flight:
            rollouts += self.backend.step()
        return rollouts


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """The weights of an architecture, made when first asked for."""
    made: dict[str, Pair] = {}
    folder = tmp_path_factory.mktemp("weights")

    def pair(model_type: str) -> Pair:
        if model_type not in made:
            made[model_type] = make_pair(model_type, folder)
        return made[model_type]

    return pair


@pytest.fixture(scope="session")
def started():
    """The backends that run already, by name."""
    return {}


@pytest.fixture
def subject_of(started, pairs):
    """A function from a backend's name to the subject, which holds the first llama and has nothing in flight."""

    def subject(name: str, model_type: str = "llama") -> Subject:
        pair = pairs(model_type)
        if name not in started:
            started[name] = Subject(name, MAKERS[name](), pair, {})
        one = started[name]
        one.pair = pair
        try:
            one.backend.drop()
        except ChildFailed:  # a test has broken it: the next one begins afresh
            started[name] = one = Subject(name, MAKERS[name](), pair, one.judges)
        if one.holds is None or one.holds.config != pair.first.config:  # two types can have one layout
            one.load(pair.first)
        elif one.holds.image != pair.first.image:
            one.swap(pair.first)
        return one

    return subject


@pytest.fixture(params=params(MAKERS))
def subject(request, subject_of) -> Subject:
    return subject_of(request.param)


@pytest.fixture(params=params(MODELS))
def model(request, subject_of) -> Subject:
    """Only the backends that compute a model."""
    return subject_of(request.param)


@pytest.fixture
def fresh():
    """A function that makes another backend of a name, with no weights yet."""
    return lambda name: MAKERS[name]()
