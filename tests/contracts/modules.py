"""The modules of a package, by name, without importing them."""

from __future__ import annotations

import pkgutil
from types import ModuleType


def modules_below(package: ModuleType) -> list[str]:
    """Every module of ``package``, itself included."""
    found = [package.__name__]
    for folder in package.__path__:
        found += _walk(folder, prefix=f"{package.__name__}.")
    return found


def _walk(folder: str, *, prefix: str) -> list[str]:
    found = []
    for module in pkgutil.iter_modules([folder], prefix):
        found.append(module.name)
        if module.ispkg:
            found += _walk(f"{folder}/{module.name.rpartition('.')[2]}", prefix=f"{module.name}.")
    return found
