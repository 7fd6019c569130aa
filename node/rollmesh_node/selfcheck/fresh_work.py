"""Work that a node gives itself for a selfcheck: leases as the learner would write them, and their results.

The engine is started, loaded and asked just as the daemon does it. Seeds are the same every time, so that two checks
of one machine can be compared. Nothing of it is ever sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from blake3 import blake3

from rollmesh_node.engine.backend import GroupRequest, SampleRequest
from rollmesh_node.engine.pipe import group_body, read_rollout
from rollmesh_node.generator import LOAD_S, EngineSetting
from rollmesh_node.journal import Entry
from rollmesh_node.results import sample_result
from rollmesh_peer.children.process import Child, open_child
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed, RollmeshError
from rollmesh_protocol.lease import Lease, LeasedSample
from rollmesh_protocol.messages import RunCard
from rollmesh_protocol.rollout import Result

FRESH_LENGTH: Final = 128
"""Longest completion, in tokens."""
SAMPLES: Final = 8
MOST_ROUNDS: Final = 32
"""Leases at most, where completions are short."""
MADE_UP_TOKENS: Final = 24
MADE_UP_PROMPTS: Final = 4
ROLLOUT_S: Final = 300.0


@dataclass(kw_only=True)
class FreshWork:
    """Leases and their results. ``failure``: why the engine stopped at one, in words; else empty."""

    results: list[tuple[Lease, Result]] = field(default_factory=list)
    failure: str = ""


async def generate(
    setting: EngineSetting,
    leases: Sequence[Lease],
    *,
    model: dict[str, object],
    stop: frozenset[int],
    least_tokens: int,
) -> FreshWork:
    """Results of as many leases (of one root) as it takes for ``least_tokens``.

    ``model``: config, layout and image for ``load``.

    Raises:
        HostError, ChildFailed, Refused: the engine cannot be started or loaded.
    """
    work, tokens = FreshWork(), 0
    async with open_child(setting.spec) as child:
        await child.call("load", model | {"root": leases[0].root} | dict(setting.load), deadline_s=LOAD_S)
        for lease in leases:
            try:
                result = await _answer(child, lease, stop=stop)
            except RollmeshError as error:
                work.failure = error.detail
                break
            work.results.append((lease, result))
            tokens += sum(len(sample.tokens) // 4 for sample in result.samples)
            if tokens >= least_tokens:
                break
    return work


def fresh_leases(entries: Sequence[Entry], *, card: RunCard, root: bytes, version: int) -> list[Lease]:
    """Leases as the learner would write them, with seeds that are the same every time, for the journal's prompts."""
    length = min(FRESH_LENGTH, card.limits.new_tokens)
    prompts = list(dict.fromkeys(entry.lease.prompt for entry in entries)) or _made_up_prompts(card)
    samples = min(SAMPLES, card.limits.samples_per_group)
    leases = []
    for number in range(MOST_ROUNDS):
        digest = blake3(b"selfcheck" + number.to_bytes(4, "little"))
        seeds = np.frombuffer(digest.digest(8 * samples), "<u8").tolist()
        leases.append(
            Lease(
                lease_id=digest.digest(16), node="", group=number,
                samples=tuple(LeasedSample(index=index, seed=seed) for index, seed in enumerate(seeds)),
                version=version, step=0, root=root, prompt=prompts[-1 - number % len(prompts)],
                max_new_tokens=length, temperature=1.0, duration_s=limits.MAX_LEASE_S, swap_mode="drain",
            )
        )  # fmt: skip
    return leases


def _made_up_prompts(card: RunCard) -> list[bytes]:
    """Prompts for a node that has not been given any: they mean nothing, which a check does not mind."""
    ordinary = np.setdiff1d(np.arange(card.vocabulary, dtype="<u4"), np.array(card.stop_tokens, dtype="<u4"))
    length = min(MADE_UP_TOKENS, card.limits.prompt_tokens)
    draws = np.frombuffer(blake3(b"selfcheck prompts").digest(8 * MADE_UP_PROMPTS * length), "<u8").reshape(
        MADE_UP_PROMPTS, length
    )
    return [ordinary[row % ordinary.size].astype("<u4").tobytes() for row in draws]


async def _answer(child: Child, lease: Lease, *, stop: frozenset[int]) -> Result:
    """What the engine makes of a lease."""
    request = GroupRequest(
        key=0, prompt=lease.prompt_ids, max_new_tokens=lease.max_new_tokens, stop=stop,
        samples=tuple(SampleRequest(index=sample.index, seed=sample.seed) for sample in lease.samples),
    )  # fmt: skip
    body = {"requests": [group_body(request)], "finish": True}
    async with child.stream("generate", body, item_deadline_s=ROLLOUT_S) as items:
        found = [read_rollout(item) async for item in items]
    samples = [sample_result(rollout) for rollout in found if rollout is not None]
    if not samples:
        raise ChildFailed("the engine made nothing of a lease")
    return Result(lease_id=lease.lease_id, samples=tuple(samples), engine="", generate_s=0.0)
