"""Linear layers whose weights are laid out once for the CPU's matrix kernels, instead of at every call.

A bf16 product on a CPU reorders its weights inside the kernel each time, which is most of its cost when few rows are
decoded: measured with SmolLM2 on one AVX-512 core, a step of 64 rows takes 0.87 of the time, one of 8 rows 0.7.

Invariants: the numbers are bit for bit those of ``nn.Linear`` (a test says so); the parameters stay where they were, so
loading, tying and the reload check do not change; after the parameters change, :meth:`PackedLinear.pack` comes first.
The packed copy takes as much memory as the weights. Where this torch or CPU does not offer it, nothing is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import torch
from torch import Tensor, nn

from rollmesh_node.engine import memory

ROWS: Final = 64
"""Rows for which the layout is chosen; it serves any number."""
SPARE: Final = 2
"""The packed copy is made where so many times its size is free."""

_Op = Callable[..., Tensor]


class PackedLinear(nn.Linear):
    """An inference-only ``nn.Linear`` that shares the parameters of another."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.pack()

    def pack(self) -> None:
        """Lay the weights out anew; needed whenever they have changed."""
        self._packed = _op("_reorder_linear_weight")(self.weight.detach(), ROWS)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
        """Return what ``nn.Linear`` returns."""
        return _op("_linear_pointwise")(input, self._packed, self.bias, "none", [], "")


def is_useful(model: nn.Module) -> bool:
    """Whether this model's linear layers can be packed here, with room to spare."""
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    if not weights or any(w.dtype != torch.bfloat16 or w.device.type != "cpu" or w.requires_grad for w in weights):
        return False
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not all(
        hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    ):
        return False
    if not ops._is_mkldnn_bf16_supported():  # noqa: SLF001 - torch keeps these for its own compiler
        return False
    free = memory.free_bytes(device="cpu")
    return free is None or free > SPARE * sum(w.numel() * w.element_size() for w in weights)


def install(model: nn.Module) -> list[PackedLinear]:
    """Replace every linear layer of the model; return the new ones."""
    packed = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                linear = PackedLinear(child)
                setattr(parent, name, linear)
                packed.append(linear)
    return packed


def _op(name: str) -> _Op:
    return cast(_Op, getattr(torch.ops.mkldnn, name))
