"""From the last chunk of a patch to weights held: a real keeper and worker, with and without decoding ahead.

The image is in memory and the chunks come in a random order; before the last one everything that can be decoded is, as
on a link that is slower than the decoder. The clock runs from the last chunk's bytes to the new root, verified and
written down. The same turns with the same orders are taken both ways, one after the other. Beside the clock stands the
processor time that the worker takes meanwhile, which other work on the machine hardly changes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Final

import trio

from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.keeper import Keeper, open_keeper
from rollmesh_peer.weights.kept_state import SnapshotPolicy
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol import limits
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.patch.codec import encode_patch
from tests.bench import patch_data
from tests.unit.weights.kit import LEARNER, RUN, SignedEdge, root_of, sign

TURNS: Final = 5
NO_SNAPSHOTS: Final = SnapshotPolicy(chain_patches=10_000, chain_most=10_000)


def measure(layout: Layout, step: patch_data.Step) -> dict:
    """Median seconds of both ways for one captured step, and how many blocks were ready in each turn."""
    return trio.run(_measure, layout, step)


async def _measure(layout: Layout, step: patch_data.Step) -> dict:
    old, new = step.old.tobytes(), step.new.tobytes()
    payloads = [encode_patch(layout, old=old, new=new), encode_patch(layout, old=new, new=old)]
    took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    ready = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        store = EdgeStore(folder / "edges", run=RUN, learner=LEARNER.peer, layout=layout, quota_bytes=limits.GIB)
        workshop = await stack.enter_async_context(open_workshop(layout))
        keeper = await stack.enter_async_context(
            open_keeper(
                folder / "weights", ram_folder=Path(memory), layout=layout, store=store, workshop=workshop,
                policy=NO_SNAPSHOTS,
            )
        )  # fmt: skip
        await keeper.restore()
        base = folder / "base.image"
        base.write_bytes(old)
        root = await keeper.adopt_base(base)
        roots = [root, root_of(layout, new)]
        version = 1
        for turn in range(-1, TURNS):  # the first one warms up
            for is_ahead in (False, True):
                for way, (image, payload) in enumerate(zip((new, old), payloads, strict=True)):
                    version += 1
                    edge = sign(
                        layout, version=version, parent=roots[way], image=image, payload=payload or b"",
                        chunk_bytes=limits.PATCH_CHUNK_BYTES,
                    )  # fmt: skip
                    child = workshop.supervisor.child
                    assert child is not None
                    *seconds, decoded = await _take(
                        keeper, store, edge, order=Random(turn), is_ahead=is_ahead, worker=child.pid
                    )
                    if turn >= 0 and way == 0:
                        took[is_ahead].append((seconds[0], seconds[1]))
                        ready += [decoded] if is_ahead else []
    plain, ahead = (tuple(map(statistics.median, zip(*took[is_ahead], strict=True))) for is_ahead in (False, True))
    return {
        "step": step.name,
        "chunks": -(-len(payloads[0] or b"") // limits.PATCH_CHUNK_BYTES),
        "blocks_ready": ready,
        "plain_s": round(plain[0], 3),
        "ahead_s": round(ahead[0], 3),
        "ratio": round(ahead[0] / plain[0], 3),
        "plain_worker_cpu_s": round(plain[1], 3),
        "ahead_worker_cpu_s": round(ahead[1], 3),
        "ratio_worker_cpu": round(ahead[1] / plain[1], 3),
    }


async def _take(
    keeper: Keeper, store: EdgeStore, edge: SignedEdge, *, order: Random, is_ahead: bool, worker: int
) -> tuple[float, float, int]:
    """Bring the chunks of an edge and take it: seconds from the last chunk on, the worker's, and blocks ready."""
    store.add_manifest(edge.name, edge.envelope)
    *early, last = order.sample(range(edge.manifest.chunk_count), edge.manifest.chunk_count)
    ready = 0
    for index in early:
        store.write_chunk(edge.name, index, edge.chunk(index))
        is_more = is_ahead
        while is_more and (answer := await keeper.prepare(edge.link)) is not None:
            ready, is_more = answer.ready, answer.is_more
    spent, started = _cpu_s(worker), time.perf_counter()
    store.write_chunk(edge.name, last, edge.chunk(last))
    await keeper.advance([edge.link])
    return time.perf_counter() - started, _cpu_s(worker) - spent, ready


def _cpu_s(pid: int) -> float:
    """Processor time that a process has taken, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
