"""What an operator may choose about training: most of the ``[training]`` table of a run's config, sent to the trainer.

Invariant: every value that passes here is one that the trainer can work with; a wrong one is refused before anything
starts. Importing this loads no torch. It holds no paths, and nothing that follows from other settings: the batch's
shape (groups, samples, tokens) belongs to the run and is passed in by the coordinator.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollmesh_peer.config.section import Unit
from rollmesh_protocol import limits

MICRO_BATCH_TOKENS: Final = 1024
"""Tokens of one forward pass by default: enough rows for matrix products to be quick, and 2 GB for a 135M model."""
LOGITS_BYTES: Final = 128 * limits.MIB
"""Float32 logits that exist at one time; 682 tokens of a vocabulary of 49,152."""

Share = Annotated[float, Unit("share of 1")]


class TrainingSettings(BaseModel):
    """How rollouts become a step. The defaults are those seen to learn; trust.md (layer L8) explains the objective."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    lr: Annotated[float, Unit("per step"), Field(gt=0, le=1)] = 1e-6
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: Annotated[int, Unit("optimiser steps"), Field(ge=0, le=1_000_000)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    beta1: Annotated[Share, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: Annotated[Share, Field(ge=0, lt=1)] = 0.999
    """AdamW: decay of the mean of squared gradients."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """AdamW: added to the root of the mean of squared gradients."""
    weight_decay: Annotated[float, Unit("per step and lr"), Field(ge=0, le=10)] = 0.0
    """AdamW: decoupled weight decay."""
    max_gradient_norm: Annotated[float, Unit("L2 norm"), Field(gt=0)] = 1.0
    """A larger gradient is scaled down to this."""

    scale: Literal["std", "none"] = "std"
    """Advantages are rewards minus their group's mean, divided by the group's standard deviation or not."""
    clip_low: Annotated[Share, Field(gt=0, lt=1)] = 0.2
    """The probability ratio to the policy at the start of the step is clipped below 1 - clip_low."""
    clip_high: Annotated[Share, Field(gt=0, le=10)] = 0.2
    """The same ratio is clipped above 1 + clip_high."""
    importance_cap: Annotated[float, Unit("ratio"), Field(ge=1, le=100)] = 2.0
    """The most that a token counts for having been unlikely under the weights that generated it."""
    delta: Annotated[float, Unit("nats"), Field(gt=0, le=10)] = 0.4
    """A log-probability that a node claims is pulled to within this of the learner's own."""
    kl: Annotated[float, Unit("weight"), Field(ge=0, le=100)] = 0.0
    """Weight of the divergence from the base model in the loss; 0 keeps no copy of the base model."""
    epochs: Annotated[int, Unit("passes"), Field(ge=1, le=16)] = 1
    """Passes over each batch."""
    minibatches: Annotated[int, Unit("optimiser steps"), Field(ge=1, le=64)] = 1
    """Optimiser steps of each pass, each over whole groups."""

    micro_batch_tokens: Annotated[int, Unit("tokens"), Field(ge=16, le=1 << 24)] = MICRO_BATCH_TOKENS
    """Tokens of one forward and backward pass, shared beginnings counted once; bounds the trainer's memory."""
    logits_bytes: Annotated[int, Unit("bytes"), Field(ge=limits.MIB, le=64 * limits.GIB)] = LOGITS_BYTES
    """Float32 logits that exist at one time; bounds the trainer's memory."""

    @property
    def single_update(self) -> bool:
        """Whether a batch makes one optimiser step, so that the policy being differentiated is the old policy."""
        return self.epochs == 1 and self.minibatches == 1

    def lr_at(self, update: int) -> float:
        """Return the learning rate of optimiser step ``update``, counted from 1."""
        return self.lr * min(1.0, update / self.warmup_steps) if self.warmup_steps else self.lr
