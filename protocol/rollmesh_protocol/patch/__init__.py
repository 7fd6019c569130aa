"""Lossless weight patches: what turns one image into another, bit for bit. See :mod:`rollmesh_protocol.patch.codec`."""
