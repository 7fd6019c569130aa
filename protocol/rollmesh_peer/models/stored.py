"""The tensors of a model folder's safetensors files, by name, read one at a time.

Invariant: no tensor is in memory before it is asked for, and files stay open no longer than the context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.layout import Layout


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Open every file; ``UsageError`` names one that is truncated or no safetensors file."""
        self._open = contextlib.ExitStack()
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = self._open.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise UsageError(f"{path} cannot be read: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def fits(self, layout: Layout) -> bool:
        """Whether every tensor of the layout is there in bf16 and its shape."""
        for spec in layout.tensors:
            if spec.name not in self._files:
                return False
            stored = self._files[spec.name].get_slice(spec.name)
            if stored.get_dtype() != "BF16" or tuple(stored.get_shape()) != spec.shape:
                return False
        return True
