"""`make bench-patch`: how small and how fast patches of real steps are, against the entropy bound and other encodings.

For each captured step (see :mod:`tests.bench.capture_steps`; captured first where they are missing, half an hour): the
bytes that a node fetches, manifest included, over the exponent-context bound, which is computed here from scratch; the
sizes of other encodings of the same data; encoding and decoding + applying in GB of full weights per second on one core
(the best of some turns: this machine has other things to do), beside a plain comparison of the two images; and the
memory that each takes beside the images. Then a chain of patches on the whole model: forth, back over the flips, and
forth again, bit by bit; and the time from the last chunk to weights held (:mod:`tests.bench.last_chunk`). The last line
is one JSON object: ``rows``, ``chain``, ``last_chunk``, ``ok`` and ``misses``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from rollmesh_protocol.layout import Layout
from rollmesh_protocol.patch.codec import decoded, encode_patch
from tests.bench import last_chunk, patch_data
from tests.bench.e2e import base_model

ROOT: Final = Path(__file__).parents[2]
MOST_RATIO: Final = 1.15
LEAST_ENCODE_GBS: Final = 0.5
LEAST_APPLY_GBS: Final = 1.0
TURNS: Final = 4
CAPTURE_S: Final = 3 * 3600
LAST_CHUNK_OF: Final = ("base-1e-6", "base-1e-5")


def main() -> int:
    """Measure, print a table, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-patch"))
    parser.add_argument("--chain", type=int, default=50, help="patches in a row on the whole model")
    parser.add_argument("--steps", type=Path, help="folder with captured steps (default: OUT/steps)")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    steps = chosen.steps or out / "steps"
    capture_missing(out, steps)
    layout = patch_data.layout_of(steps)
    rows = []
    for name, number in patch_data.names():
        rows.append(measure(layout, patch_data.load(steps, name, number)))
        print(_line(rows[-1]), flush=True)
    chain = follow_chain(layout, patch_data.load(steps, *patch_data.names()[0]).old, length=chosen.chain)
    print(f"a chain of {chain['patches']} patches, back and forth again: {chain['outcome']}")
    last = [last_chunk.measure(layout, patch_data.load(steps, name, 7)) for name in LAST_CHUNK_OF]
    for row in last:
        print(f"{row['step']:<24}last chunk to weights held: {row['ahead_s']} s, {row['ratio']} x without a head start")
    misses = sorted(
        {miss for row in rows for miss in row["misses"]} | ({"chain"} if chain["outcome"] != "identical" else set())
    )
    figures = {
        "rows": rows,
        "chain": chain,
        "last_chunk": last,
        "targets": {"ratio": MOST_RATIO, "encode_gb_per_s": LEAST_ENCODE_GBS, "apply_gb_per_s": LEAST_APPLY_GBS},
    }
    print(json.dumps(figures | {"ok": not misses, "misses": misses}))
    return 0


def capture_missing(out: Path, steps: Path) -> None:
    """Run the capture; it keeps what is there."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.bench.capture_steps", "--model", str(base_model(out)), "--out", str(steps)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, timeout=CAPTURE_S, check=False, cwd=ROOT, env=environ)
    if done.returncode:
        raise SystemExit("the steps could not be captured")


def measure(layout: Layout, step: patch_data.Step) -> dict:
    """One row of the table."""
    old, new = step.old.tobytes(), step.new.tobytes()
    payload = encode_patch(layout, old=old, new=new)
    assert payload is not None
    image = bytearray(old)
    encode_s, apply_s, compare_s = [], [], []
    for _ in range(TURNS):
        started = time.perf_counter()
        assert np.count_nonzero(step.old != step.new)
        compare_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        assert encode_patch(layout, old=old, new=new) == payload
        encode_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        flips = list(decoded(layout, image, payload))
        for part in flips:
            part.apply(image)
        apply_s.append(time.perf_counter() - started)
        is_forth = image == new
        for part in flips:
            part.apply(image)
        is_back = image == old
    bound = patch_data.exponent_bound_bytes(step)
    fetched = len(payload) + manifest_bytes(layout, payload)
    gigabytes = layout.image_bytes / 1e9
    row = {
        "step": step.name,
        "full_bytes": layout.image_bytes,
        "changed": round(float(np.count_nonzero(step.old != step.new)) / step.old.size, 6),
        "patch_bytes": len(payload),
        "fetched_bytes": fetched,
        "bound_bytes": round(bound),
        "ratio": round(len(payload) / bound, 4),
        "ratio_fetched": round(fetched / bound, 4),
        "times_smaller": round(layout.image_bytes / fetched),
        "others_bytes": patch_data.other_encodings(step),
        "encode_gb_per_s": round(gigabytes / min(encode_s), 3),
        "apply_gb_per_s": round(gigabytes / min(apply_s), 3),
        "compare_gb_per_s": round(gigabytes / min(compare_s), 3),
        "lossless": is_forth and is_back,
        "peak_mb": peak_memory_mb(layout, old, new, payload),
    }
    row["misses"] = [
        name
        for name, is_missed in (
            ("ratio", row["ratio_fetched"] > MOST_RATIO),
            ("encode", row["encode_gb_per_s"] < LEAST_ENCODE_GBS),
            ("apply", row["apply_gb_per_s"] < LEAST_APPLY_GBS),
            ("lossless", not row["lossless"]),
        )
        if is_missed
    ]
    return row


def manifest_bytes(layout: Layout, payload: bytes) -> int:
    """The length of the signed manifest of this payload."""
    from tests.unit.weights.kit import LEARNER, sign

    image = bytes(layout.image_bytes)
    return len(
        sign(
            layout, version=7, parent=bytes(32), image=image, payload=payload, identity=LEARNER, chunk_bytes=1 << 18
        ).envelope
    )


_PEAK_PROGRAM: Final = """
import json, mmap, sys, threading
from pathlib import Path
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.patch.codec import decoded, encode_patch
from tests.bench import last_chunk, patch_data
folder, verb = Path(sys.argv[1]), sys.argv[2]
def mapped(name):
    with (folder / name).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
def anonymous_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
def tiny():
    layout = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(64,)),))
    payload = encode_patch(layout, old=bytes(128), new=bytes(126) + b"\1\1")
    list(decoded(layout, bytes(128), payload))
tiny()  # loads the machine code
layout = patch_data.layout_of(folder)
old, new, payload = mapped("old"), mapped("new"), (folder / "payload").read_bytes()
def work():
    if verb == "encode":
        encode_patch(layout, old=old, new=new)
    else:
        for flips in decoded(layout, old, payload):
            pass
peak, start, done = 0, anonymous_kb(), threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_kb())
thread = threading.Thread(target=watch); thread.start()
work(); done.set(); thread.join()
print(json.dumps(max(0, peak - start) / 1024))
"""


def peak_memory_mb(layout: Layout, old: bytes, new: bytes, payload: bytes) -> dict[str, float]:
    """Memory beside the mapped images while encoding and decoding, in a process of its own (MiB)."""
    found = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        for part, data in (("old", old), ("new", new), ("payload", payload), ("layout.msgpack", layout.encode())):
            (folder / part).write_bytes(data)
        for verb in ("encode", "decode"):
            command = [sys.executable, "-c", _PEAK_PROGRAM, name, verb]
            told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
            found[verb] = round(float(told.stdout), 1)
    return found


def follow_chain(layout: Layout, words: np.ndarray, *, length: int) -> dict:
    """Patch after patch from a model whose fp32 masters drift at a learning rate of 1e-5; every image is compared."""
    generator = np.random.default_rng(0)
    masters = (words.astype(np.uint32) << 16).view(np.float32)
    masters[~np.isfinite(masters)] = 0
    truth, image = words.tobytes(), bytearray(words.tobytes())
    kept, sizes = [], []
    for number in range(length):
        masters += np.float32(1e-5) * generator.standard_normal(len(masters), dtype=np.float32)
        masters[words_of_padding(layout)] = 0
        new = _rounded(masters).tobytes()
        payload = encode_patch(layout, old=truth, new=new)
        assert payload is not None
        sizes.append(len(payload))
        flips = list(decoded(layout, image, payload))
        for part in flips:
            part.apply(image)
        if image != new:
            return {"patches": number + 1, "outcome": "different"}
        kept.append((truth, payload) if number >= length - 3 else (None, payload))
        last_flips = flips
        truth = new
    back = bytearray(image)
    for part in last_flips:
        part.apply(back)
    is_back = back == kept[-1][0]
    for part in decoded(layout, back, kept[-1][1]):
        part.apply(back)
    outcome = "identical" if is_back and back == image else "different after going back"
    return {"patches": length, "outcome": outcome, "patch_bytes_mean": round(sum(sizes) / len(sizes))}


def _rounded(floats: np.ndarray) -> np.ndarray:
    """To bf16, ties to even; uint16."""
    bits = floats.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def words_of_padding(layout: Layout) -> np.ndarray:
    """The indices of the words between tensors."""
    ends = [(offset + tensor.tensor_bytes) // 2 for offset, tensor in zip(layout.offsets, layout.tensors, strict=True)]
    starts = [offset // 2 for offset in layout.offsets[1:]] + [layout.image_bytes // 2]
    return np.concatenate([np.arange(end, start) for end, start in zip(ends, starts, strict=True)])


def _line(row: dict) -> str:
    best = min(row["others_bytes"].values())
    return (
        f"{row['step']:<24}{row['changed'] * 100:7.3f} % {row['fetched_bytes']:>10,} B  1/{row['times_smaller']:<5}"
        f"{row['ratio_fetched']:>7.3f} x bound  best other {best / row['fetched_bytes']:.2f} x  "
        f"encode {row['encode_gb_per_s']:.2f}  apply {row['apply_gb_per_s']:.2f} GB/s  peak {row['peak_mb']} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
