"""Configuration files: TOML into frozen models, with overrides, and back into a TOML file that explains itself.

Each component keeps its own section, a small :class:`Section`; this package only reads, checks and prints them. It
knows no component, and a value is never derived here.
"""

from rollmesh_peer.config.loading import load
from rollmesh_peer.config.rendering import render_toml
from rollmesh_peer.config.section import Located, Section, Unit

__all__ = ["Located", "Section", "Unit", "load", "render_toml"]
