"""One cell of a calibration: rollouts from an engine process, recomputed by an auditor process.

The engine is spoken to over its pipe as a node does (verbs and bodies: ``rollmesh_node.engine.pipe``, which a learner
does not import). Seeds and the choice of prompts are a function of the cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from rollmesh_learner.audit.derive import CellData
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.process import Child
from rollmesh_peer.children.supervisor import Supervisor
from rollmesh_protocol.errors import ChildFailed

SAMPLES: Final = 4
"""Rollouts of one prompt, where the batch has room for them."""
AUDIT_AT_ONCE: Final = 64
CALL_S: Final = 600.0

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What cells are measured with."""

    engine_load: Body
    image: Path
    prompts: list[bytes]
    stop: list[int]
    new_tokens: int
    auditor: Supervisor


async def fill(cell: CellData, parts: Parts, *, engine: Child, count: int, tell: Tell) -> None:
    """Generate ``count`` rollouts, as many side by side as the cell says, and recompute them."""
    random = Random(f"{cell.dtype} {cell.batch}")
    waiting: list[Body] = []
    done = 0
    while done < count:
        groups = _groups(parts, rows=min(cell.batch, count - done), random=random)
        by_key = {group["key"]: group for group in groups}
        body = {"requests": groups, "finish": True}
        async with engine.stream("generate", body, item_deadline_s=CALL_S) as items:
            waiting += [_claim(item["rollout"], by_key) async for item in items if "rollout" in item]
        cell.prompt_tokens += sum(len(bytes_of(group, "prompt")) // 4 for group in groups)
        done += min(cell.batch, count - done)
        if len(waiting) >= AUDIT_AT_ONCE or done == count:
            await _recompute(cell, parts, claims=waiting)
            waiting = []
            largest = max(float(margins.max()) for margins in cell.margins)
            tell(f"{cell.dtype}, batch {cell.batch}: {done} of {count} rollouts, largest margin {largest:.2f} nats")


def _groups(parts: Parts, *, rows: int, random: Random) -> list[Body]:
    """Requests for ``rows`` rollouts altogether, of prompts taken at random."""
    samples = max(1, min(SAMPLES, rows // 2))
    return [
        {
            "key": first,
            "prompt": random.choice(parts.prompts),
            "samples": [{"index": i, "seed": random.getrandbits(64)} for i in range(min(samples, rows - first))],
            "max_new_tokens": parts.new_tokens,
            "stop": parts.stop,
        }
        for first in range(0, rows, samples)
    ]


def _claim(item: object, groups: dict[object, Body]) -> Body:
    """What the auditor is asked about one rollout of the engine."""
    if not isinstance(item, dict):
        raise ChildFailed("the engine sent a rollout that is none")
    group = groups[item["key"]]
    seeds = {sample["index"]: sample["seed"] for sample in group["samples"]}  # type: ignore[attr-defined]
    return {
        "key": 0,
        "prompt": group["prompt"],
        "tokens": bytes_of(item, "tokens"),
        "logprobs": bytes_of(item, "logprobs"),
        "seed": seeds[item["index"]],
    }


async def _recompute(cell: CellData, parts: Parts, *, claims: Sequence[Body]) -> None:
    for start in range(0, len(claims), AUDIT_AT_ONCE):
        some = list(claims[start : start + AUDIT_AT_ONCE])
        async with parts.auditor.use() as child:
            answer = await child.call("audit", {"image": str(parts.image), "rollouts": some}, deadline_s=CALL_S)
        outcomes = answer["rollouts"]
        if not isinstance(outcomes, list) or len(outcomes) != len(some):
            raise ChildFailed("the auditor answered with the wrong number of rollouts")
        for claim, outcome in zip(some, outcomes, strict=True):
            exact = np.frombuffer(bytes_of(outcome, "exact_logprobs"), dtype="<f4")
            cell.margins.append(np.frombuffer(bytes_of(outcome, "margins"), dtype="<f4"))
            cell.exact.append(exact)
            cell.gaps.append(np.abs(np.frombuffer(bytes_of(claim, "logprobs"), dtype="<f4") - exact))


def bytes_of(body: Body, name: str) -> bytes:
    """The field of a child's answer that holds bytes."""
    value = body.get(name)
    if not isinstance(value, bytes):
        raise ChildFailed(f"a child process answered without {name}")
    return value
