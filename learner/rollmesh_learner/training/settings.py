"""What an operator may choose about training: the ``[training]`` table of a run's config, also sent to the trainer.

Invariant: every value that passes here is one that the trainer can work with; a wrong one is refused before anything
starts. Importing this loads no torch. It holds no paths, and nothing that follows from other settings: the batch's
shape (groups, samples, tokens) belongs to the run and is passed in by the coordinator.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

MICRO_BATCH_TOKENS: Final = 1024
"""Tokens of one forward pass by default: long enough rows for matrix products, and a mask of 1,024 x 1,024."""
LOGITS_BYTES: Final = 128 * 1024 * 1024
"""Float32 logits that exist at one time; 682 tokens of a vocabulary of 49,152."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TrainingSettings(BaseModel):
    """How rollouts become a step. The defaults are those seen to learn; trust.md (layer L8) explains the objective."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: Positive = Field(default=1e-6, description="learning rate of AdamW after the warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises linearly")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW: decay of the mean of gradients")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW: decay of the mean of squared gradients")
    adam_epsilon: Positive = Field(default=1e-8, description="AdamW: added to the root of the mean of squares")
    weight_decay: NotNegative = Field(default=0.0, description="AdamW: decoupled weight decay")
    max_gradient_norm: Positive = Field(default=1.0, description="gradients with a larger L2 norm are scaled to it")

    scale: Literal["std", "none"] = Field(
        default="std", description="advantages: rewards minus their group's mean, divided by its deviation or not"
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="the ratio to the old policy is clipped below 1 - this")
    clip_high: Positive = Field(default=0.2, description="the ratio to the old policy is clipped above 1 + this")
    importance_cap: float = Field(
        default=2.0, ge=1, description="most that a token counts for having been unlikely under older weights"
    )
    delta: Positive = Field(
        default=0.4, description="nats that a node's claimed log-probability may differ from ours before it is clamped"
    )
    kl: NotNegative = Field(default=0.0, description="weight of the KL divergence to the base model; 0 loads none")
    epochs: int = Field(default=1, ge=1, le=16, description="passes over each batch")
    minibatches: int = Field(default=1, ge=1, le=64, description="optimiser steps per pass, each over whole groups")

    micro_batch_tokens: int = Field(
        default=MICRO_BATCH_TOKENS, ge=16, description="most tokens of one forward and backward pass (memory)"
    )
    logits_bytes: int = Field(
        default=LOGITS_BYTES, ge=1024 * 1024, description="most bytes of float32 logits at one time (memory)"
    )
    share_prefixes: bool = Field(
        default=True, description="compute what samples have in common once, where the model is seen to allow it"
    )

    @property
    def single_pass(self) -> bool:
        """Whether a batch makes exactly one optimiser step, so that the old policy is the one being differentiated."""
        return self.epochs == 1 and self.minibatches == 1

    def lr_at(self, update: int) -> float:
        """Return the learning rate of optimiser step ``update``, counted from 1."""
        return self.lr * min(1.0, update / self.warmup_steps) if self.warmup_steps else self.lr
