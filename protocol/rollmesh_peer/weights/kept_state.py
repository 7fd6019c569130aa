"""What a keeper writes down: from which snapshot and along which chain its weights can be made again. Pure.

The state file is replaced as a whole and names only what was durable before it was written. When a snapshot is worth
its bytes is decided here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from pydantic import Field

from rollmesh_protocol import limits
from rollmesh_protocol.lease import DIGEST_BYTES
from rollmesh_protocol.record import Record

STATE_BYTES: Final = 4 * limits.MIB
"""A digest for each tensor of the snapshot, and one for each patch of the chain."""
DAY_S: Final = 86_400.0


class Named(Record):
    """Weights by their root, and what the learner last called them. Version 0: a base that no version has named."""

    root: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    version: int = Field(ge=0)
    step: int = Field(ge=0)
    tensors: bytes
    """The digest of each tensor, in the order of the layout."""


class Budget(Record):
    """Snapshot bytes written in the day that started at ``started_at``, seconds since the epoch by our own clock."""

    started_at: float
    spent_bytes: int = Field(ge=0)

    def at(self, now: float) -> Self:
        """The budget as of ``now``: a new day, or a clock that went backwards, starts afresh."""
        if 0 <= now - self.started_at < DAY_S:
            return self
        return self.model_copy(update={"started_at": now, "spent_bytes": 0})

    def spend(self, count: int) -> Self:
        """The budget after writing ``count`` bytes more."""
        return self.model_copy(update={"spent_bytes": self.spent_bytes + count})


class KeptState(Record):
    """Weights = the snapshot (or the anchor that begins the chain), and then the patches of the chain in order."""

    layout: bytes
    highest: int = Field(ge=0)
    """The highest version whose weights were ever verified here."""
    snapshot: Named | None
    chain: tuple[bytes, ...]
    """Names of manifests in the edge store. If the first is an anchor, there is no snapshot."""
    root: bytes | None
    version: int = Field(ge=0)
    step: int = Field(ge=0)
    budget: Budget


@dataclass(frozen=True)
class SnapshotPolicy:
    """When one snapshot replaces snapshot + chain: a restart reads an image and applies the chain."""

    chain_patches: int = 64
    """Patches after which a snapshot is due: applied at 4 GB/s, they take as long as reading 32 images from an SSD."""
    chain_most: int = 1024
    """Patches after which it is made whatever the budget says."""
    daily_bytes: int = 64 * limits.GIB
    """Snapshot bytes a day; a consumer SSD of 1 TB is rated for some 300 GB a day over five years."""

    def is_due(self, *, patches: int, chain_bytes: int, image_bytes: int, spent_bytes: int) -> bool:
        """True when the chain is long, or larger than an image, and the day's budget allows one more image."""
        if patches == 0:
            return False
        if patches >= self.chain_most:
            return True
        is_long = patches >= self.chain_patches or chain_bytes >= image_bytes
        return is_long and spent_bytes + image_bytes <= self.daily_bytes
