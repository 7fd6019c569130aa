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
        """What recomputing it costs: prompt and completion; what came before is read again for each newer version."""
        prompt = len(self.prompt) // 4
        return prompt + self.rollout.num_tokens + sum(prompt + later.first_token for later in self.rollout.later)
