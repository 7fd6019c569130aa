"""Makes an environment by its name. Pure: environments of other packages are handed in (``children.plugins`` in
``rollmesh_peer`` finds them), and a built-in name always means the built-in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rollmesh_protocol.environments import addition, reasoning_gym
from rollmesh_protocol.environments.interface import Environment, EnvironmentFactory
from rollmesh_protocol.environments.parameters import nearest
from rollmesh_protocol.errors import UsageError

BUILT_IN: Final[Mapping[str, EnvironmentFactory]] = MappingProxyType(
    {addition.NAME: addition.make, reasoning_gym.NAME: reasoning_gym.make}
)
NO_OTHERS: Final[Mapping[str, EnvironmentFactory]] = MappingProxyType({})


def make_environment(
    name: str, parameters: Mapping[str, object], *, seed: int, others: Mapping[str, EnvironmentFactory] = NO_OTHERS
) -> Environment:
    """The environment ``name`` with these parameters. Raises ``UsageError`` with the nearest names for unknown ones."""
    factory = BUILT_IN.get(name) or others.get(name)
    if factory is None:
        raise UsageError(f"there is no environment {name!r}{nearest(name, [*BUILT_IN, *others])}")
    return factory(parameters, seed=seed)
