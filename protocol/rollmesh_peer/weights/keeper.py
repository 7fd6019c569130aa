"""The daemon's working copy of the weights. (Skeleton: signatures stand, bodies follow.)"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from rollmesh_protocol.manifest import Manifest


@dataclass(frozen=True)
class View:
    """Verified weights that do not change while the view is held."""

    image: Path
    root: bytes
    version: int
    step: int


class Keeper:
    """Made by ``async with open_keeper(...) as keeper``. ``root`` is None while there are no verified weights."""

    root: bytes | None
    version: int
    """The name of the weights held; 0 for a base model that no published version has named yet."""
    step: int
    highest: int
    """The highest version ever verified (kept over restarts)."""

    async def restore(self) -> None:
        """Snapshot + chain from disk into the working copy; root stays None when nothing on disk is good."""
        raise NotImplementedError

    async def adopt_base(self, image: Path, *, expected_root: bytes | None = None, version: int = 0, step: int = 0) -> bytes:
        """Take a base model's image (linked or copied) as snapshot and working copy; its root."""
        raise NotImplementedError

    async def advance(self, path: Sequence[tuple[bytes, Manifest]]) -> None:
        """Take these edges (name, manifest), whose payloads are complete in the store, one after the other.

        Refused: manifest.parent, manifest.version, patch.invalid, patch.root (then the weights are as they were, or
        restored from disk). HostError: disk or memory. ChildFailed: the worker process died (weights restored).
        """
        raise NotImplementedError

    async def confirm(self, *, root: bytes, version: int, step: int) -> bool:
        """A signed header names the root held under a newer version: take the name. False when root is another."""
        raise NotImplementedError

    def is_refused(self, name: bytes) -> bool:
        """True for a manifest whose payload gave wrong weights before: plan around it."""
        raise NotImplementedError

    def reading(self) -> AbstractAsyncContextManager[View]:
        """Hold the weights as they are. LinkLost when there are none within the deadline."""
        raise NotImplementedError

    async def wait_changed(self, root: bytes | None) -> View:
        """Wait until verified weights with another root than ``root`` are held."""
        raise NotImplementedError
