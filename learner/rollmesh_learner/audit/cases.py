"""A rollout to recompute, wherever it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh_learner.work.groups import StoredRollout


@dataclass(frozen=True)
class Case:
    """A rollout to recompute, and the prompt that it answers (little-endian uint32 token ids)."""

    rollout: StoredRollout
    prompt: bytes

    @property
    def num_tokens(self) -> int:
        """What recomputing it costs: prompt and completion."""
        return len(self.prompt) // 4 + self.rollout.num_tokens
