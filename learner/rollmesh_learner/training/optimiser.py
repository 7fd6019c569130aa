"""AdamW on float32 masters, for a model that computes in bfloat16.

A step at a small learning rate moves most weights by less than a bfloat16 can show; the masters remember it. Gradients
leave the model as soon as each is complete and are added up in float32 over the micro-batches, so that the model's
own bfloat16 gradients never exist together.

Invariant: after a step every parameter of the model is its master, rounded to the model's type. Masters and moments go
by the parameter's name, so they survive another order of parameters; a tied parameter exists once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rollmesh_learner.training.settings import TrainingSettings
from rollmesh_protocol.errors import ChildFailed

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class MasterOptimiser:
    """Owns masters, gradient sums and moments. Parameters accumulate into it from the moment it is made."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, settings: TrainingSettings) -> None:
        self._parameters = dict(parameters)
        self._settings = settings
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
        self.updates = 0
        """Optimiser steps made in the life of these masters."""
        self._adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(True)
            self.masters[name].grad = torch.zeros_like(self.masters[name])
            parameter.register_post_accumulate_grad_hook(_Adder(_gradient(self.masters[name])))

    def clear(self) -> None:
        """Forget the gradients of a step that was not made."""
        for master in self.masters.values():
            _gradient(master).zero_()

    def step(self) -> float:
        """Make one AdamW step from the gradients added up since the last, and clear them; returns their L2 norm.

        A norm that is not finite changes nothing but the gradients, which are dropped: the caller sees it and says so.
        """
        gradients = [_gradient(master) for master in self.masters.values()]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            if norm > self._settings.max_gradient_norm:
                for gradient in gradients:
                    gradient.mul_(self._settings.max_gradient_norm / norm)
            self.updates += 1
            self._adam.param_groups[0]["lr"] = self._settings.lr_at(self.updates)
            self._adam.step()
            self._round()
        self.clear()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return the moments by ``<parameter>.<moment>``; empty before the first step."""
        return {
            f"{name}.{moment}": self._adam.state[master][moment]
            for name, master in self.masters.items()
            if master in self._adam.state
            for moment in _MOMENTS
        }

    def restore(self, *, masters: Mapping[str, Tensor], state: Mapping[str, Tensor], updates: int) -> None:
        """Take over what ``masters``, ``state()`` and ``updates`` once were; ``ChildFailed`` when they do not fit."""
        if masters.keys() != self.masters.keys():
            raise ChildFailed("the checkpoint's masters are not the model's parameters", code="trainer.checkpoint")
        wanted = {f"{name}.{moment}" for name in masters for moment in _MOMENTS} if state else set()
        if state.keys() != wanted:
            raise ChildFailed("the checkpoint's optimiser state is incomplete", code="trainer.checkpoint")
        for name, master in self.masters.items():
            if masters[name].shape != master.shape or masters[name].dtype != torch.float32:
                raise ChildFailed(f"the checkpoint's master of {name} has another shape", code="trainer.checkpoint")
            with torch.no_grad():
                master.copy_(masters[name])
            if state:
                self._adam.state[master] = {
                    moment: state[f"{name}.{moment}"].to(master.device, copy=True) for moment in _MOMENTS
                }
        self.updates = updates
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name])


class _Adder:
    """Moves a parameter's gradient into its float32 sum as soon as it is complete."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def __call__(self, parameter: Tensor) -> None:
        self._total.add_(_gradient(parameter))
        parameter.grad = None


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # the optimiser gave it one, or the hook runs because it has one
    return parameter.grad
