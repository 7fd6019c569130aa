"""Between a model's tensors and the flat image of its layout: measure, copy in, copy out, compare.

Invariant: the image is a file that other processes map too, so a model never computes on its pages: weights are
copied. An image written here is the bytes of :class:`rollmesh_protocol.layout.Layout`: every tensor at its offset,
zeros between, and it appears under its name only when complete.

Not here: who verifies an image against a root (the daemon, before any child sees it), and building models
(:mod:`.loader`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from rollmesh_peer.bit_sums import BF16_EXPONENT, Sums, image_sums, sums_of_words
from rollmesh_protocol.errors import ChildFailed, Refused
from rollmesh_protocol.layout import Dtype, Layout, TensorSpec

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_NAMES: Final[Mapping[torch.dtype, Dtype]] = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_PIECE: Final = 1 << 24
"""Words summed at a time where they are widened: 128 MiB on a GPU."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, sorted by name, a tied tensor once (its first name)."""
    saved = model.state_dict(keep_vars=True).keys()
    named: dict[str, Tensor] = dict(model.named_parameters())
    named.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return {name: named[name] for name in sorted(named)}


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of a model, on any device ('meta' too). ``Refused("patch.dtype")`` for other dtypes."""
    specs = []
    for name, tensor in weights_of(model).items():
        if tensor.dtype not in _NAMES:
            raise Refused("patch.dtype", f"the tensor {name} has type {tensor.dtype}; runs use bf16, fp16 or fp32")
        specs.append(TensorSpec(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape)))
    return Layout(tensors=tuple(specs))


def copy_image_into(model: nn.Module, *, layout: Layout, image: Path) -> None:
    """Copy every tensor of ``image`` into the model's own memory, whatever its device and float type.

    Raises ``ChildFailed("child.weights")`` when the file's length or the model's tensors do not fit the layout.
    """
    weights = weights_of(model)
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != {t.name: t.shape for t in layout.tensors}:
        raise ChildFailed("the model built from the config does not have the run's layout", code="child.weights")
    with _mapped(image, layout) as tensor_at, torch.no_grad():
        for index, spec in enumerate(layout.tensors):
            weights[spec.name].copy_(tensor_at(index))


def image_tensors(image: Path, *, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, view of the mapped file) for every tensor, in the layout's order. Nobody may write to the views.

    A view keeps the mapping alive. ``ChildFailed("child.weights")`` when the file's length does not fit the layout.
    """
    with _mapped(image, layout) as tensor_at:
        for index, spec in enumerate(layout.tensors):
            yield spec.name, tensor_at(index)


def write_image(weights: Mapping[str, Tensor], *, layout: Layout, image: Path, durable: bool = False) -> None:
    """Write the image of named tensors (see :func:`weights_of`) atomically; ``durable`` waits for the disk as well.

    Tensors are converted to the layout's dtype (fp32 masters to bf16: round to nearest even). KeyError when one is
    missing, ValueError when its shape differs.
    """
    partial = image.with_name(f"{image.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
                file.write(bytes(offset - file.tell()))
                file.write(_bytes_of(weights[spec.name], spec))
            file.write(bytes(layout.image_bytes - file.tell()))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(image)
    finally:
        partial.unlink(missing_ok=True)


def model_sums(model: nn.Module, *, layout: Layout) -> tuple[Sums, ...]:
    """Return the reload sums of every tensor of a model in the layout's types, computed where the tensors live.

    A model that computes in float32 is measured as the bf16 that it was filled from.
    """
    weights = weights_of(model)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as executor:
        return tuple(
            tensor_sums(weights[spec.name].detach().to(TORCH_DTYPES[spec.dtype]), executor=executor)
            for spec in layout.tensors
        )


def check_reload(model: nn.Module, *, layout: Layout, image: Path, expected: Sequence[Sums] | None = None) -> None:
    """Raise ``ChildFailed("child.weights")`` with the tensor's name when model and image do not hold the same bits.

    ``expected`` are the image's sums where they are known already; else the image is read for them.
    """
    if expected is None:
        expected = image_sums(np.memmap(image, dtype=np.uint8, mode="r").data, layout=layout)
    found = model_sums(model, layout=layout)
    for spec, want, have in zip(layout.tensors, expected, found, strict=True):
        if want != have:
            raise ChildFailed(
                f"after loading, the tensor {spec.name} does not hold the bits of the weights file",
                code="child.weights",
            )


def tensor_sums(tensor: Tensor, *, executor: Executor | None = None) -> Sums:
    """Return the reload sums of a tensor's memory (see :mod:`rollmesh_peer.bit_sums`), computed where it lives."""
    words = tensor.detach().contiguous().reshape(-1).view(torch.int16)
    dtype = _NAMES[tensor.dtype]
    if _is_here(words):
        return sums_of_words(words.numpy().view(np.uint16), dtype=dtype, executor=executor)
    total, squares = 0, 0
    for piece in torch.split(words, _PIECE):
        wide = piece.long() & 0xFFFF
        if dtype == "bf16":
            wide *= (wide & int(BF16_EXPONENT)) != 0
        total += int(wide.sum())
        squares += int((wide * wide).sum())
    return total % 2**64, squares % 2**64


def _is_here(words: Tensor) -> bool:
    return words.device.type == "cpu"


def _bytes_of(tensor: Tensor, spec: TensorSpec) -> memoryview:
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"the tensor {spec.name} has shape {tuple(tensor.shape)}, not {spec.shape}")
    plain = tensor.detach().to(device="cpu", dtype=TORCH_DTYPES[spec.dtype]).contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy().data)


@contextmanager
def _mapped(image: Path, layout: Layout) -> Iterator[Callable[[int], Tensor]]:
    """Yield a function from a tensor's index to a view of the mapped file; the views die with the context."""
    with image.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != layout.image_bytes:
            raise ChildFailed(
                f"the weights file has {size} bytes, the layout {layout.image_bytes}", code="child.weights"
            )
        # Copy-on-write only because torch warns about read-only memory; nothing is ever written.
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else None

    def tensor_at(index: int) -> Tensor:
        spec = layout.tensors[index]
        dtype = TORCH_DTYPES[spec.dtype]
        if mapped is None or not spec.elements:
            return torch.empty(spec.shape, dtype=dtype)
        flat = torch.frombuffer(mapped, dtype=dtype, count=spec.elements, offset=layout.offsets[index])
        return flat.reshape(spec.shape)

    yield tensor_at
