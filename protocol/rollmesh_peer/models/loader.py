"""The one loader of engine, trainer and auditor: from a config and an image to a model with exactly those bits.

Invariants: the same config gives the same computation in every process. Parameters are bf16, but RoPE's ``inv_freq``
stays float32 (``model.to(bfloat16)`` would round it, and other positions would get other angles). Weights never come
from anywhere but the verified image. No code that comes with a model is run.

Attention is PyTorch's SDPA: on a CPU and on CUDA it runs a fused kernel that never holds the [T, T] scores, and takes
the same masks everywhere. ``eager`` (plain matmul and softmax) is there to measure how much kernels differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from rollmesh_peer.bit_sums import Sums
from rollmesh_peer.models.architecture import read_config
from rollmesh_peer.models.folder import Json
from rollmesh_peer.models.image import check_reload, copy_image_into, layout_of
from rollmesh_protocol import limits
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import Layout

Attention = Literal["sdpa", "eager"]
Arithmetic = Literal["bfloat16", "float32"]
"""What is computed with. Runs use bf16 weights; float32 is for CPUs without bf16 and for measuring its rounding."""


def build_model(
    config: Json, *, arithmetic: Arithmetic = "bfloat16", attention: Attention = "sdpa", device: str = "cpu"
) -> PreTrainedModel:
    """Return the model of a config in eval mode, without gradients, its weights not filled in yet.

    On 'meta' it takes no memory (for layouts). Raises ``Refused("card.model")``: see :mod:`.architecture`.
    """
    dtype = torch.float32 if arithmetic == "float32" else torch.bfloat16
    read = read_config(config)
    try:
        with torch.device("meta" if device == "meta" else "cpu"), _without_random_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                read, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Refused("card.model", f"the config makes no model: {' '.join(str(error).split())[:200]}") from error
    model.tie_weights()
    if device not in {"meta", "cpu"}:
        model.to(device)  # type: ignore[arg-type]  # device only: a dtype here would round inv_freq
    model.eval()
    model.requires_grad_(False)
    return model


def best_device() -> str:
    """Return 'cuda' or 'mps' where there is one, else 'cpu'."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def layout_of_config(config: Json) -> Layout:
    """Return the layout of a config's weights; ``Refused`` when it is not loaded or larger than a run may be."""
    layout = layout_of(build_model(config, device="meta"))
    if layout.image_bytes > limits.MAX_MODEL_BYTES:
        raise Refused("card.model", f"the model takes {layout.image_bytes} bytes, more than a run may")
    return layout


def require_layout(config: Json, *, layout: Layout) -> None:
    """Raise ``Refused("card.model")`` when the config makes other tensors than the layout has; nothing is allocated."""
    if layout_of_config(config).digest != layout.digest:
        raise Refused("card.model", "the model of the config has other tensors than the layout of the run")


def load_model(
    config: Json,
    *,
    layout: Layout,
    image: Path,
    sums: Sequence[Sums] | None = None,
    arithmetic: Arithmetic = "bfloat16",
    attention: Attention = "sdpa",
    device: str = "cpu",
) -> PreTrainedModel:
    """Return the model of a config with the weights of an image, checked by the reload sums (``sums`` if known).

    Raises ``Refused("card.model")`` for the config, before a tensor exists when it makes other tensors than the layout
    has (which is what limits were checked against); ``ChildFailed("child.weights")`` when the image does not agree.
    """
    require_layout(config, layout=layout)
    model = build_model(config, arithmetic=arithmetic, attention=attention, device=device)
    copy_image_into(model, layout=layout, image=image)
    check_reload(model, layout=layout, image=image, expected=sums)
    return model


@contextmanager
def _without_random_weights() -> Iterator[None]:
    """Skip the library's random initialisation, a second per 100M parameters that the image overwrites anyway."""
    with no_init_weights():
        yield
