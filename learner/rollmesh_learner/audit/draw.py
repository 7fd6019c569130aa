"""Which rollouts are audited: a draw that only the learner can make, after the result is in, and never makes twice."""

from __future__ import annotations

import struct
from typing import Final

from blake3 import blake3

_TOP: Final = float(1 << 64)


def is_drawn(audit_key: bytes, *, lease_id: bytes, sample: int, rate: float) -> bool:
    """True with probability ``rate``; the same answer for the same rollout, whatever happens in between.

    keyed blake3(``audit_key``, lease id and sample) read as a number in [0, 1). A crash does not draw again, and a
    higher rate audits a superset of what a lower one would.
    """
    drawn: int = struct.unpack("<Q", blake3(lease_id + struct.pack("<I", sample), key=audit_key).digest(8))[0]
    return drawn / _TOP < rate
