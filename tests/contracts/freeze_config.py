"""Freezes the surface of the configuration after a wanted change: ``python -m tests.contracts.freeze_config``.

Also writes the example of a node again, which shows every default.
"""

from __future__ import annotations

import json

from rollmesh_node.config import NodeConfig
from rollmesh_peer.config import render_toml
from rollmesh_peer.config.rendering import surface
from tests.contracts.test_config import MODELS, NODE_EXAMPLE, SURFACE

NODE_HEAD = """\
# Every setting of a node at its default. A node needs no file:
#
#     rollmesh node run --join <line>
#
# Keep what you change, and give it as: rollmesh node run --config node.toml --join <line>

"""

if __name__ == "__main__":
    SURFACE.write_text(json.dumps({side: surface(model) for side, model in MODELS.items()}, indent=2) + "\n")
    NODE_EXAMPLE.write_text(NODE_HEAD + render_toml(NodeConfig()))
