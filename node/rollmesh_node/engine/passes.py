"""Passes of the model over a :class:`.kv_cache.RowCache`: new tokens in, last hidden states and logits out.

Invariant: a token at column c of its row has position c, and sees the columns up to c of that row, whatever else is
there. Decode steps (one token a row) may run compiled, until the compiler fails: a pass writes the same columns when it
is made again, so nothing is lost. The rest never is.

Not here: what is fed, and when (:mod:`.prefill`, :mod:`.decoding`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh_node.engine.kv_cache import RowCache
from rollmesh_peer.models.logprobs import additive_mask, output_head


class Passes:
    """One model, as the decode uses it."""

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:  # noqa: A002 - torch's word
        """With ``compile``, decode steps go through ``torch.compile``."""
        self._model = model
        self._head = output_head(model)
        self._cache_name = cache_argument(model)
        self._compiled: Callable[..., Any] | None = torch.compile(model.base_model, dynamic=True) if compile else None
        self.compiled = "yes" if compile else "no"
        """Whether decode steps are compiled, or why not, for a person."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._model.device

    @property
    def layers(self) -> int:
        """Of the model, and of its caches."""
        return int(self._model.config.num_hidden_layers)

    def extend(self, ids: Tensor, *, columns: Tensor, cache: RowCache) -> Tensor:
        """Feed ids [rows, n] to the first rows of the cache, at ``columns`` [rows, n]; return the states [rows, n, H].

        Both are int64 on the CPU. Along a row columns ascend by one.
        """
        cache.aim(columns)
        positions = columns.to(self.device)
        alike = positions[:1] if bool((columns == columns[:1]).all()) else positions  # one mask for all rows
        visible = torch.arange(cache.window, device=self.device) <= alike[:, None, :, None]
        given = {
            "input_ids": ids.to(self.device),
            "position_ids": positions,
            "attention_mask": additive_mask(visible, dtype=self._model.dtype),
            "use_cache": True,
            self._cache_name: cache,
        }
        if self._compiled is not None and ids.shape[1] == 1:
            try:
                return self._states(self._compiled, given)
            except torch._dynamo.exc.TorchDynamoException as error:  # noqa: SLF001 - its name
                self._compiled, self.compiled = None, f"failed: {' '.join(str(error).split())[:200]}"
        return self._states(self._model.base_model, given)

    @staticmethod
    def _states(forward: Callable[..., Any], given: dict[str, object]) -> Tensor:
        states: Tensor = forward(**given).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [n, V] of states [n, H], where a draw can be made.

        A draw takes 64-bit floats, which Apple's GPUs do not have.
        """
        logits: Tensor = self._head(states)
        return logits.cpu() if logits.device.type == "mps" else logits


def cache_argument(model: PreTrainedModel) -> str:
    """Return what this version of the library calls the cache: ``cache``, or ``past_key_values`` before 5.20."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"
