"""What a change of weights costs: the swap against the bare copy, the tail of a drain, a hold and its way back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from rollmesh_node.engine import pipe
from rollmesh_node.engine.backend import GroupRequest
from rollmesh_node.engine.pipe import group_body
from rollmesh_node.engine.segments import Completion
from rollmesh_peer.bit_sums import Sums, image_sums, pack_sums
from rollmesh_peer.children.process import Child
from rollmesh_protocol.layout import Layout
from tests.bench.engine_feed import ITEM_S, LOAD_S, until_drawing

SWAPS: Final = 6
ROOTS: Final = (bytes(32), bytes(31) + b"\x01")


def other_image(image: Path, other: Path) -> None:
    """The same weights with the last bit of half of them turned: about what a step of training changes."""
    words = np.fromfile(image, dtype=np.uint16)
    words ^= np.random.default_rng(1).integers(0, 2, words.size, dtype=np.uint16)
    words.tofile(other)


async def measure(child: Child, images: Sequence[Path], *, layout: Layout) -> dict:
    """Swaps back and forth with nothing in flight, beside the copy of the same bytes in the same minute."""
    holds, copies, sums = [], [], []
    packed = [pack_sums(_image_sums(image, layout)) for image in images]  # a daemon has them before the engine stops
    for turn in range(SWAPS):
        image = images[(turn + 1) % 2]
        copies.append(_seconds(lambda image=image: _copy(image)))
        started = time.perf_counter()
        which = {"image": str(image), "root": ROOTS[(turn + 1) % 2], "sums": packed[(turn + 1) % 2]}
        await child.call("swap", which, deadline_s=LOAD_S)
        holds.append(time.perf_counter() - started)
        sums.append(_seconds(lambda image=image: _image_sums(image, layout)))
    hold, copy = statistics.median(holds), statistics.median(copies)
    notes = (await child.call("stats", {}, deadline_s=60))["notes"]
    print(f"swap: {hold:.3f} s, copying the tensors {copy:.3f} s", flush=True)
    return {
        "hold_s": [round(seconds, 4) for seconds in holds],
        "copy_s": [round(seconds, 4) for seconds in copies],
        "times_copy": round(hold / copy, 2),
        "one_sum_of_the_bits_s": round(statistics.median(sums), 4),
        "parts": notes.get("swap", "") if isinstance(notes, dict) else "",
        "image_mb": round(layout.image_bytes / 1e6, 1),
    }


async def drain(child: Child, requests: Sequence[GroupRequest]) -> dict:
    """Seconds from the word to finish until the last sample in flight has ended, and what was drawn meanwhile."""
    async with child.stream("generate", {}, item_deadline_s=ITEM_S) as stream:
        stream.tell(pipe.ADD, {"requests": [group_body(request) for request in requests[:8]]})
        await until_drawing(stream)
        started = time.perf_counter()
        stream.tell(pipe.FINISH, {})
        done = [item for item in [pipe.read_item(body) async for body in stream] if isinstance(item, Completion)]
        tail = time.perf_counter() - started
    return {
        "samples": sum(len(request.samples) for request in requests[:8]),
        "ended_in_the_tail": len(done),
        "tail_s": round(tail, 3),
    }


async def recompute(child: Child, requests: Sequence[GroupRequest], images: Sequence[Path], *, layout: Layout) -> dict:
    """A hold in the middle, a swap, and on: each in seconds, and every sample complete at the end."""
    few, packed = requests[:4], pack_sums(_image_sums(images[1], layout))
    async with child.stream("generate", {}, item_deadline_s=ITEM_S) as stream:
        stream.tell(pipe.ADD, {"requests": [group_body(request) for request in few]})
        await until_drawing(stream)
        started = time.perf_counter()
        stream.tell(pipe.HOLD, {})
        held = [pipe.read_item(body) async for body in stream]
    hold_s = time.perf_counter() - started
    await child.call("swap", {"image": str(images[1]), "root": ROOTS[1], "sums": packed}, deadline_s=LOAD_S)
    swapped = time.perf_counter()
    async with child.stream("generate", {"finish": True}, item_deadline_s=ITEM_S) as stream:
        rest = [pipe.read_item(body) async for body in stream]
    done = [item for item in (*held, *rest) if isinstance(item, Completion)]
    return {
        "hold_s": round(hold_s, 3),
        "swap_s": round(swapped - started - hold_s, 3),
        "samples_again": sum(len(item.segments) > 1 or item in rest for item in done),
    }


def _image_sums(image: Path, layout: Layout) -> tuple[Sums, ...]:
    return image_sums(np.memmap(image, dtype=np.uint8, mode="r").data, layout=layout)


def _copy(image: Path) -> None:
    """Every byte of the mapped file into memory of its own, on the device where there is one."""
    words = torch.from_file(str(image), shared=False, size=image.stat().st_size // 2, dtype=torch.int16)
    if torch.cuda.is_available():
        words.to("cuda")
        torch.cuda.synchronize()
    else:
        _TARGETS.setdefault(words.numel(), torch.empty_like(words)).copy_(words)


_TARGETS: dict[int, torch.Tensor] = {}
"""Memory that has its pages already, as a model's has."""


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
