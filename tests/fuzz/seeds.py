"""Good inputs to start from: ``python -m tests.fuzz.seeds FOLDER patch|manifest``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.weights.kit import MIXED, nudged, patch, random_image


def main(folder: Path, target: str) -> None:
    """Write a few, of patches with few and many changes."""
    old = random_image(MIXED, 5)
    for number, share in enumerate((0.0005, 0.05, 1.0)):
        edge = patch(MIXED, old, nudged(MIXED, old, 6, share=share), version=7)
        seeds = (edge.payload,) if target == "patch" else (edge.envelope, edge.manifest.encode())
        for part, seed in enumerate(seeds):
            (folder / f"seed-{number}-{part}").write_bytes(seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
