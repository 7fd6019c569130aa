"""Addresses of the last run: a small JSON file, newest first, written whole or not at all.

Only addresses at which the peer itself answered belong here. The file is a help, never a condition: whatever is wrong
with it, it counts as empty.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final

from rollmesh_peer.mesh.address import PeerAddress, parse_peer_address
from rollmesh_protocol import limits
from rollmesh_protocol.errors import UsageError

log = logging.getLogger("rollmesh.mesh.cache")

_FORMAT: Final = 1
_MAX_FILE_BYTES: Final = 1 << 20


class PeerCache:
    """Peers that answered, with their addresses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers: OrderedDict[str, list[PeerAddress]] = OrderedDict()
        for address in reversed(_read(path)):
            self._put(address)

    def remember(self, address: str) -> None:
        """The peer of this full address answered there just now. Saved at once; a full disk is no error.

        Raises:
            UsageError: the address is malformed.
        """
        self._put(parse_peer_address(address))
        try:
            self._save()
        except OSError as error:
            log.warning("the addresses of peers are not saved: %s", error)

    def addresses_of(self, peer: str) -> tuple[str, ...]:
        """Full addresses of one peer, newest first."""
        return tuple(str(address) for address in self._peers.get(peer, ()))

    def peers(self) -> tuple[str, ...]:
        """Every remembered peer, newest first."""
        return tuple(reversed(self._peers))

    def _put(self, address: PeerAddress) -> None:
        known = self._peers.pop(address.peer, [])
        others = [other for other in known if other != address]
        self._peers[address.peer] = [address, *others][: limits.MAX_CACHED_ADDRESSES]
        while len(self._peers) > limits.MAX_CACHED_PEERS:
            self._peers.popitem(last=False)

    def _save(self) -> None:
        newest_first = [address for peer in self.peers() for address in self.addresses_of(peer)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        with fresh.open("w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "addresses": newest_first}, file, indent=0)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


def _read(path: Path) -> list[PeerAddress]:
    """The addresses in the file that can be used."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        texts = content["addresses"] if content["format"] == _FORMAT else []
        found = []
        for text in list(texts)[: limits.MAX_CACHED_PEERS * limits.MAX_CACHED_ADDRESSES]:
            try:
                found.append(parse_peer_address(text))
            except (UsageError, TypeError, AttributeError):
                continue
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("the remembered addresses in %s cannot be read: %s", path, error)
        return []
