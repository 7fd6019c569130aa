"""The reload check of the vLLM backend: what the image holds against what the workers compute with. No vllm here.

Invariant: :func:`check` passes only when every tensor of the image is accounted for by exactly one group of parameters
and every group of parameters by tensors of the image. With tensor parallelism a worker holds a part of a matrix (parts
add up over the workers) or all of it (a norm: then each worker must have it right).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rollmesh_peer.bit_sums import Sums
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
    groups = _groups(first)
    found = [_by_group(worker, groups) for worker in workers]
    if strangers := set(found[0]) - set(groups):
        raise _mismatch(min(strangers), "is in no tensor of the weights file")
    for held, parts in groups.items():
        if any(held not in mine for mine in found):
            raise _mismatch(held, "is not among the model's parameters")
        expected = _added(parts)
        mine = [_added(worker[held]) for worker in found]
        whole = all(entry.elements == expected.elements for entry in mine)
        right = all(entry.sums == expected.sums for entry in mine) if whole else _added(mine).sums == expected.sums
        if not right:
            raise _mismatch(held, "does not hold the bits of the weights file")


def _groups(worker: Held) -> dict[str, list[ParameterSums]]:
    """Return the image's tensors by the name of what holds them in vLLM."""
    groups: dict[str, list[ParameterSums]] = {}
    for name, entry in worker.expected.items():
        fused = ".".join(worker.fused.get(part, part) for part in name.split("."))
        held = next((one for one in (name, fused) if one in worker.found), _experts(name) or fused)
        groups.setdefault(held, []).append(entry)
    if HEAD in worker.found and HEAD not in groups:  # tied: the head computes with the embedding's matrix
        groups[HEAD] = groups.get(EMBEDDING, [])
    return groups


def _by_group(worker: Held, groups: Mapping[str, object]) -> dict[str, list[ParameterSums]]:
    found: dict[str, list[ParameterSums]] = {}
    for name, entry in worker.found.items():
        found.setdefault(name if name in groups else _experts(name) or name, []).append(entry)
    return found


def _experts(name: str) -> str | None:
    """Return what stands for all experts of a layer, whose matrices vLLM stacks under other names."""
    before, found, _ = name.partition(".experts.")
    return f"{before}.experts" if found else None


def _added(parts: Sequence[ParameterSums]) -> ParameterSums:
    total = sum(part.sums[0] for part in parts) % 2**64
    squares = sum(part.sums[1] for part in parts) % 2**64
    return ParameterSums(elements=sum(part.elements for part in parts), sums=(total, squares))


def _mismatch(held: str, what: str) -> ChildFailed:
    return ChildFailed(f"after loading into vLLM, {held} {what}", code="child.weights")
