"""Weights into vLLM: from the verified image to the worker's parameters, and the proof that they arrived.

Invariant: after an update, every parameter's bits are compared with the image's by sums (see
:func:`rollmesh_peer.models.image.model_sums`), group by group: vLLM fuses q, k and v, and gate and up, and sums of
parts add up. What is summed is what is computed with: where a CPU kernel has packed a matrix away, it is read back by
feeding it unit vectors, whose products are exact.

The image is mapped by every worker. On a GPU each tensor crosses the bus once: it is summed and loaded from there.
Sums are of bfloat16 words (:mod:`rollmesh_peer.bit_sums`), whatever the image has.

Not here: what happens on a mismatch (the backend refuses to generate), and who verified the image (the daemon). This
module is imported by vLLM's workers only, and imports vllm.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollmesh_node.engine import vllm_sampler
from rollmesh_node.engine.vllm_sums import Held, ParameterSums
from rollmesh_peer.bit_sums import Sums, read_sums
from rollmesh_peer.models.image import image_tensors, tensor_sums
from rollmesh_protocol import limits
from rollmesh_protocol.layout import Layout

PROBE_ROWS: Final = 512
"""Unit vectors multiplied at a time when a packed matrix is read back."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is set up: the image is a file."""


@dataclass
class ImageUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the weights are."""

    image: str
    layout: bytes
    """``Layout.encode()``."""
    sums: bytes = b""
    """The image's, by ``pack_sums``; empty where they are not known."""


class ImageTransferEngine(WeightTransferEngine[NoInit, ImageUpdate]):  # type: ignore[misc]
    """Loads all tensors of a mapped image; vLLM's layerwise reload puts them where kernels and graphs look."""

    init_info_cls = NoInit
    update_info_cls = ImageUpdate
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.expected: dict[str, ParameterSums] = {}
        """Of the last image, by the tensor's name."""
        self.sums_s = 0.0
        """Of the last update: time spent on the image's sums."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Make the model take weights again, and forget what was expected of the last ones."""
        self.expected = {}
        self.sums_s = 0.0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ImageUpdate) -> None:
        """Load every tensor of the image."""
        layout = Layout.decode(update_info.layout, limit=limits.CARD_BYTES)
        try:
            tensors = image_tensors(Path(update_info.image), layout=layout)
            if update_info.sums and all(spec.dtype == "bf16" for spec in layout.tensors):
                known = read_sums(update_info.sums, layout=layout)
                for spec, entry in zip(layout.tensors, known, strict=True):
                    self.expected[spec.name] = ParameterSums(elements=spec.elements, sums=entry)
            else:
                tensors = self._measured(tensors)
            self.model.load_weights(one for named in tensors for one in _as_published(*named))
        except BaseException:
            finalize_layerwise_reload(self.model, self.model_config)  # or the next update would go on with this one
            raise

    def finish_weight_update(self) -> None:
        """Load what waited for the end (padded and attention layers), and leave the model ready."""
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""

    def _measured(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, stored in tensors:
            tensor = stored.to(self.device)
            started = time.perf_counter()
            self.expected[name] = ParameterSums(elements=tensor.numel(), sums=_flushed_sums(tensor))
            self.sums_s += time.perf_counter() - started
            yield name, tensor


def _as_published(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor under the names of published files: transformers stacks the experts of a layer, gate before up.

    vLLM takes stacks too, but not in this order, which no sum can see.
    """
    before, found, last = name.rpartition(".experts.")
    if not found or last not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for number, matrix in enumerate(tensor):
        parts = matrix.chunk(2) if last == "gate_up_proj" else (matrix,)
        words = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for word, part in zip(words, parts, strict=True):
            yield f"{before}.experts.{number}.{word}.weight", part


def _repack_tied_head(model: nn.Module) -> None:
    """Pack a tied output head again: no tensor of the image has its name, so the reload leaves its old packing be.

    Seen with vLLM 0.32 on a CPU; without this the head computes with the weights before the last.
    """
    head, embedding = getattr(model, "lm_head", None), _embedding_of(model)
    if head is None or embedding is None or not hasattr(head, "cpu_linear"):
        return
    if head.weight is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


class WorkerReport:
    """What the backend may ask each worker for, beside vLLM's own calls."""

    weight_transfer_engine: ImageTransferEngine

    @torch.no_grad()
    def rollmesh_sums(self) -> dict[str, object]:
        """Return the sums of the last image and those of the parameters as they are now (``Held.encode``)."""
        engine = self.weight_transfer_engine
        started = time.perf_counter()
        packed = getattr(engine.model, "packed_modules_mapping", None) or {}
        return Held(
            expected=engine.expected,
            found=parameter_sums(engine.model),
            fused={part: whole for whole, parts in packed.items() for part in parts},
            image_s=engine.sums_s,
            check_s=time.perf_counter() - started,
        ).encode()

    def rollmesh_spent(self) -> list[float]:
        """Return the seconds that sampling took in this worker so far, and the tokens that it drew."""
        return [vllm_sampler.spent.seconds, float(vllm_sampler.spent.tokens)]


def parameter_sums(model: nn.Module) -> dict[str, ParameterSums]:
    """Return the sums of every parameter of a vLLM model as its kernels see it, a shared one once.

    The output head is read through its kernel, as ``lm_head``, even where its matrix is the embedding's.
    """
    head = getattr(model, "lm_head", None) or _embedding_of(model)
    found: dict[str, ParameterSums] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            found[name] = ParameterSums(elements=parameter.numel(), sums=_flushed_sums(parameter))
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and (module is head or not weight.numel()):
            label = "lm_head" if module is head else name
            found[f"{label}.weight"] = _read_back(module, columns=_columns_of(module))
    return found


def _embedding_of(model: nn.Module) -> nn.Module | None:
    return getattr(getattr(model, "model", None), "embed_tokens", None)


def _columns_of(module: nn.Module) -> int:
    for field in ("input_size_per_partition", "embedding_dim", "input_size"):
        if isinstance(size := getattr(module, field, None), int):
            return size
    raise RuntimeError(f"cannot tell how wide the packed matrix of a {type(module).__name__} is")


def _read_back(module: nn.Module, *, columns: int) -> ParameterSums:
    """Return the sums of a packed matrix [N, columns]: unit vector i gives column i, rounded nowhere."""
    elements, total, squares = 0, 0, 0
    for start in range(0, columns, PROBE_ROWS):
        rows = min(PROBE_ROWS, columns - start)
        probe = torch.zeros((rows, columns), dtype=_arithmetic_of(module))
        probe[torch.arange(rows), torch.arange(start, start + rows)] = 1
        read: Tensor = module.cpu_linear(probe, module.weight, None)  # type: ignore[operator]
        elements += read.numel()
        more = _flushed_sums(read)
        total, squares = total + more[0], squares + more[1]
    return ParameterSums(elements=elements, sums=(total % 2**64, squares % 2**64))


def _arithmetic_of(module: nn.Module) -> torch.dtype:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.dtype


def _flushed_sums(tensor: Tensor) -> Sums:
    """Return the sums of a tensor's bfloat16 words, with what a kernel may flush counted as zero."""
    return tensor_sums(tensor.detach().to(torch.bfloat16))
