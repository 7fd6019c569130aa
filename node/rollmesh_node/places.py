"""Where a node keeps its things. Light: the command line imports it for every sub-command."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollmesh_node.config import NodeConfig
from rollmesh_peer.folders import node_folder, private_folder

KEY: Final = "key"
"""The key file's name in the node's folder."""


def folder_of(config: NodeConfig, folder: Path | None) -> Path:
    """The node's folder: the flag's, the config's, or the default; made if need be."""
    chosen = folder or config.node.folder
    return private_folder(chosen.expanduser().absolute()) if chosen is not None else node_folder()
