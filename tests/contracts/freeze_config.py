"""Freezes the surface of the configuration after a wanted change: ``python -m tests.contracts.freeze_config``."""

from __future__ import annotations

import json

from rollmesh_peer.config.rendering import surface
from tests.contracts.test_config import MODELS, SURFACE

if __name__ == "__main__":
    SURFACE.write_text(json.dumps({side: surface(model) for side, model in MODELS.items()}, indent=2) + "\n")
