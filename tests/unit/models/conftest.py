"""One thread, and a tiny model on disk and in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmesh_peer.models.base import write_base_image
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.models.loader import load_model
from rollmesh_peer.testing.tiny_model import prepare_tiny
from tests.unit.models.tiny import Tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny model of seed 1: folder, image, and loaded in both arithmetics."""
    folder = prepare_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=1)
    image: Path = folder.parent / "image"
    layout = write_base_image(folder, image=image)
    config = ModelFolder.open(folder).config
    return Tiny(
        folder=folder,
        image=image,
        config=config,
        layout=layout,
        bf16=load_model(config, layout=layout, image=image),
        fp32=load_model(config, layout=layout, image=image, arithmetic="float32"),
    )
