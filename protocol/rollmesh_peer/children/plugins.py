"""Finds environments by name: built-in, from an installed package's entry point, or from a module on the path.

The pure registry makes environments; this module does the looking up, which reads the file system and imports code.
It runs in child processes only (prompter, scorer): a daemon never imports an environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from rollmesh_protocol.environments.interface import Environment, EnvironmentFactory
from rollmesh_protocol.environments.parameters import nearest
from rollmesh_protocol.environments.registry import BUILT_IN, make_environment
from rollmesh_protocol.errors import UsageError

GROUP: Final = "rollmesh.environments"
"""Entry points of this group name an ``EnvironmentFactory``."""


HASH_SEED: Final = "PYTHONHASHSEED"
"""Some data sets draw from Python sets, whose order this variable decides: it is 0 wherever environments run."""


def fix_hash_seed() -> None:
    """Start this very process again with the hash seed fixed, unless it runs so. For the first line of a ``main``."""
    if sys.flags.hash_randomization and os.environ.get(HASH_SEED) != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED: "0"})  # noqa: S606


def environment_names() -> tuple[str, ...]:
    """Every environment that this installation has, built-in ones first; nothing is imported."""
    return (*BUILT_IN, *sorted(set(_installed()) - set(BUILT_IN)))


def load_environment(name: str, parameters: Mapping[str, object], *, seed: int) -> Environment:
    """The environment ``name``; ``package.module:factory`` names one that is on the path but not installed.

    Raises ``UsageError`` for an unknown name, for code that does not import, and for parameters it does not take.
    """
    if name in BUILT_IN:
        return make_environment(name, parameters, seed=seed)
    installed = _installed()
    if name in installed:
        factory = _load(name, installed[name])
    elif ":" in name:
        factory = _load(name, EntryPoint(name=name, value=name, group=GROUP))
    else:
        raise UsageError(f"there is no environment {name!r}{nearest(name, [*BUILT_IN, *installed])}")
    return make_environment(name, parameters, seed=seed, others={name: factory})


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(name: str, point: EntryPoint) -> EnvironmentFactory:
    try:
        importlib.import_module(point.module)
        factory: EnvironmentFactory = point.load()
    except Exception as error:
        raise UsageError(f"the environment {name!r} does not import: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise UsageError(f"the environment {name!r} is not a function that makes one")
    return factory
