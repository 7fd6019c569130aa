"""The reload check of the vLLM backend: what the image holds against what the workers compute with. No vllm here.

Invariant: :func:`check` passes only when every tensor of the image is accounted for by exactly one group of parameters
and every group of parameters by tensors of the image. With tensor parallelism a worker holds a part of a matrix (parts
add up over the workers) or all of it (a norm: then each worker must have it right).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rollmesh_peer.models.image import Sums
from rollmesh_protocol.errors import ChildFailed

HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"


@dataclass(frozen=True)
class ParameterSums:
    """Sums of one tensor's words, and its number of elements (padding included)."""

    elements: int
    sums: Sums


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one worker tells: the image's tensors by name, and its own parameters by name."""

    expected: Mapping[str, ParameterSums]
    found: Mapping[str, ParameterSums]
    fused: Mapping[str, str]
    """Part of a tensor's name -> the part under which vLLM holds it (q_proj -> qkv_proj)."""
    image_s: float
    check_s: float

    def encode(self) -> dict[str, object]:
        """Return plain containers that vLLM's pipes carry."""
        return asdict(self)

    @classmethod
    def decode(cls, body: Mapping[str, Any]) -> Held:
        """Return what :meth:`encode` was called on."""
        tables = {
            side: {
                name: ParameterSums(elements=entry["elements"], sums=(entry["sums"][0], entry["sums"][1]))
                for name, entry in body[side].items()
            }
            for side in ("expected", "found")
        }
        return cls(**tables, fused=body["fused"], image_s=body["image_s"], check_s=body["check_s"])


def check(workers: Sequence[Held], *, names: Sequence[str]) -> None:
    """Raise ``ChildFailed("child.weights")`` unless the workers together hold exactly the tensors ``names``."""
    first = workers[0]
    if set(first.expected) != set(names):
        raise _mismatch("the weights file", "was not read to its end")
    groups: dict[str, list[ParameterSums]] = {}
    for name in names:
        held = name if name in first.found else ".".join(first.fused.get(part, part) for part in name.split("."))
        groups.setdefault(held, []).append(first.expected[name])
    if HEAD in first.found and HEAD not in groups:  # tied: the head computes with the embedding's matrix
        groups[HEAD] = groups.get(EMBEDDING, [])
    for stranger in sorted(set(first.found) - set(groups)):
        raise _mismatch(stranger, "is in no tensor of the weights file")
    for held, parts in groups.items():
        expected = _added([part.sums for part in parts])
        elements = sum(part.elements for part in parts)
        if any(held not in worker.found for worker in workers):
            raise _mismatch(held, "is not among the model's parameters")
        mine = [worker.found[held] for worker in workers]
        whole = all(entry.elements == elements for entry in mine)
        right = all(entry.sums == expected for entry in mine) if whole else _added([e.sums for e in mine]) == expected
        if not right:
            raise _mismatch(held, "does not hold the bits of the weights file")


def _added(sums: Sequence[Sums]) -> Sums:
    return sum(total for total, _ in sums) % 2**64, sum(squares for _, squares in sums) % 2**64


def _mismatch(held: str, what: str) -> ChildFailed:
    return ChildFailed(f"after loading into vLLM, {held} {what}", code="child.weights")
