"""The secrets of a run beside its identity: the key of seeds and the key of audit draws, each in a 0600 file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollmesh_peer.keys import create_key
from rollmesh_protocol.errors import HostError
from rollmesh_protocol.lease import SEED_KEY_BYTES


@dataclass(frozen=True, kw_only=True)
class RunKeys:
    """32 bytes each. A node that knew the seed key could choose its work, one that knew the audit key its risks."""

    seed_key: bytes
    audit_key: bytes

    def __repr__(self) -> str:
        return "RunKeys(...)"


def load_run_keys(folder: Path) -> RunKeys:
    """The keys in ``folder``, made on first use. They must never change within a run: seeds follow from them."""
    return RunKeys(seed_key=_load(folder / "seed.key"), audit_key=_load(folder / "audit.key"))


def _load(path: Path) -> bytes:
    try:
        create_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise HostError(f"the key file {path} cannot be used: {error.strerror}") from error
    if len(key) != SEED_KEY_BYTES:
        raise HostError(f"{path} is not a key file of {SEED_KEY_BYTES} bytes")
    return key
