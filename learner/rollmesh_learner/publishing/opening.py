"""Opens the publisher with all that it stands on: a place in memory for images, and the worker that encodes patches.

Beside it the archive of older versions, which uses the same place and the same worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rollmesh_learner.config import LearnerConfig
from rollmesh_learner.publishing.archive import Archive
from rollmesh_learner.publishing.publisher import Publisher
from rollmesh_peer.folders import private_folder
from rollmesh_peer.weights import durable
from rollmesh_peer.weights.ram import Place, memory_left, open_place
from rollmesh_peer.weights.workshop import open_workshop
from rollmesh_protocol import limits
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout

SPARE_IMAGES: Final = 3
"""Images in memory beside the ring: the one being exported, the one being encoded, and one of slack."""


@asynccontextmanager
async def open_publisher(
    config: LearnerConfig, *, run: str, identity: Identity, folder: Path, layout: Layout
) -> AsyncIterator[tuple[Publisher, Archive, Path]]:
    """The publisher with its worker process, the archive, and the folder in memory where their images lie."""
    ring = config.rollouts.staleness + 2
    needed = (ring + len(config.weights.skip_every) + SPARE_IMAGES) * layout.image_bytes
    ram_folder = Path(config.weights.ram_folder) if config.weights.ram_folder else None
    with open_place(folder, ram_folder=ram_folder, needed_bytes=needed) as place:
        async with open_workshop(layout) as workshop:
            publisher = Publisher(
                private_folder(folder / "published"),
                ram=place.folder,
                run=run,
                identity=identity,
                layout=layout,
                workshop=workshop,
                ring_versions=ring,
                anchor_every=config.weights.anchor_every,
                keep_versions=config.weights.keep_versions,
                skip_every=config.weights.skip_every,
                patch_chunk_bytes=config.weights.patch_chunk_kib * limits.KIB,
                anchor_chunk_bytes=config.weights.anchor_chunk_kib * limits.KIB,
            )
            archive = Archive(
                publisher,
                workshop=workshop,
                folder=place.folder,
                room=lambda: _free_bytes(place),
                publisher_bytes=needed,
            )
            yield publisher, archive, place.folder


def _free_bytes(place: Place) -> int:
    return memory_left(place.folder) if place.is_memory else durable.free_bytes(place.folder)
