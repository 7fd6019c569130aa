"""What the weights held can be made from again: a snapshot or an anchor, patches after it, and a file that says so.

The invariant: everything that the state file names is durable before it is written and pinned in the edge store while
it is named; what it does not name any more is deleted only after it was replaced. Methods that touch the disk block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollmesh_peer.weights import durable
from rollmesh_peer.weights.edge_store import EdgeStore
from rollmesh_peer.weights.kept_state import STATE_BYTES, Budget, KeptState, Named, SnapshotPolicy
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.layout import Layout
from rollmesh_protocol.manifest import Manifest

log = logging.getLogger("rollmesh.weights")

Link = tuple[bytes, Manifest]
"""An edge of a chain: the manifest's name, and the manifest."""

STATE: Final = "weights.state"
SNAPSHOTS: Final = "snapshots"


@dataclass(frozen=True)
class Origin:
    """A way to make weights: a whole image file that should hold ``start``, and the patches after it."""

    file: Path
    start: Named
    anchor: Link | None
    """Set when the file is an anchor's payload and not a snapshot."""
    patches: tuple[Link, ...]

    @property
    def end(self) -> Named:
        """The weights that all of it leads to."""
        return named(self.patches[-1][1]) if self.patches else self.start


class Lineage:
    """The snapshot and the chain of one keeper, in ``folder``."""

    def __init__(self, folder: Path, *, layout: Layout, store: EdgeStore) -> None:
        self.snapshot: Named | None = None
        self.chain: tuple[Link, ...] = ()
        self.budget = Budget(started_at=0.0, spent_bytes=0)
        self._folder = folder
        self._layout = layout
        self._store = store
        self._pins: dict[bytes, ExitStack] = {}
        with durable.disk_errors(f"the folder {folder} cannot be used"):
            (folder / SNAPSHOTS).mkdir(parents=True, exist_ok=True, mode=0o700)
            durable.sweep(folder)

    def set(self, snapshot: Named | None, chain: Sequence[Link]) -> None:
        """Say what the weights are made from; the edges of the chain are pinned, those of the old one let go."""
        wanted = {name for name, _ in chain}
        for name in wanted - self._pins.keys():
            stack = ExitStack()
            stack.enter_context(self._store.pin(name))
            self._pins[name] = stack
        for name in self._pins.keys() - wanted:
            self._pins.pop(name).close()
        self.snapshot = snapshot
        self.chain = tuple(chain)

    def extend(self, path: Sequence[Link]) -> None:
        """Add a path to the chain; one that begins with an anchor replaces everything."""
        if path[0][1].parent is None:
            self.set(None, path)
        else:
            self.set(self.snapshot, (*self.chain, *path))

    def snapshot_file(self, named: Named) -> Path:
        """Where the snapshot of these weights lies, or would."""
        return self._folder / SNAPSHOTS / f"{named.root.hex()}.image"

    def is_snapshot_due(self, policy: SnapshotPolicy, *, now: float) -> bool:
        """True when the chain is long enough for a new snapshot, and the budget allows it."""
        patches = [manifest for _, manifest in self.chain if manifest.parent is not None]
        return policy.is_due(
            patches=len(patches),
            chain_bytes=sum(manifest.payload_bytes for manifest in patches),
            image_bytes=self._layout.image_bytes,
            spent_bytes=self.budget.at(now).spent_bytes,
        )

    # --- disk --------------------------------------------------------------------------------------------------------
    def write(self, held: Named | None, *, highest: int) -> None:
        """Make the present state durable, and then delete snapshots that it does not name. HostError: the disk."""
        state = KeptState(
            layout=self._layout.digest,
            highest=highest,
            snapshot=self.snapshot,
            chain=tuple(name for name, _ in self.chain),
            root=held.root if held else None,
            version=held.version if held else 0,
            step=held.step if held else 0,
            budget=self.budget,
        )
        durable.write_file(self._folder / STATE, state.encode())
        kept = self.snapshot_file(self.snapshot) if self.snapshot else None
        for file in (self._folder / SNAPSHOTS).iterdir():
            if file != kept:
                file.unlink(missing_ok=True)

    def read(self) -> KeptState | None:
        """What was last written, or None when there is nothing of use."""
        path = self._folder / STATE
        try:
            state = KeptState.decode(path.read_bytes(), limit=STATE_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, Refused) as error:
            log.warning("%s is of no use: %s", path, error)
            return None
        if state.layout != self._layout.digest:
            log.warning("%s is about another model", path)
            return None
        self.budget = state.budget
        return state

    def origins(self, state: KeptState | None) -> list[Origin]:
        """Ways to make weights, best first: what the state names, then each whole anchor in the store, newest first."""
        found = []
        if state is not None:
            chain = self._whole_chain(state)
            if chain and chain[0][1].parent is None:
                found.append(self._from_anchor(chain))
            elif state.snapshot is not None and self.snapshot_file(state.snapshot).exists():
                found.append(self.from_snapshot(state.snapshot, chain))
        links = [(name, self._store.manifest(name)) for name in self._store.names() if self._store.is_complete(name)]
        anchors = [(name, manifest) for name, manifest in links if manifest is not None and manifest.parent is None]
        anchors.sort(key=lambda link: link[1].version, reverse=True)
        return found + [self._from_anchor((anchor,)) for anchor in anchors]

    def from_snapshot(self, snapshot: Named, chain: Sequence[Link] = ()) -> Origin:
        """The way from a snapshot along a chain."""
        return Origin(file=self.snapshot_file(snapshot), start=snapshot, anchor=None, patches=tuple(chain))

    def _from_anchor(self, chain: Sequence[Link]) -> Origin:
        name, anchor = chain[0]
        return Origin(
            file=self._store.payload_path(name),
            start=named(anchor),
            anchor=chain[0],
            patches=tuple(chain[1:]),
        )

    def _whole_chain(self, state: KeptState) -> tuple[Link, ...]:
        """The state's chain up to the first edge that is missing or does not fit."""
        chain: list[Link] = []
        at = state.snapshot.root if state.snapshot is not None else None
        for name in state.chain:
            manifest = self._store.manifest(name)
            if manifest is None or manifest.parent != at or not self._store.is_complete(name):
                log.warning("the chain on disk is cut after %d of %d patches", len(chain), len(state.chain))
                break
            chain.append((name, manifest))
            at = manifest.root
        return tuple(chain)


def named(manifest: Manifest) -> Named:
    """The weights that an edge leads to."""
    return Named(root=manifest.root, version=manifest.version, step=manifest.step, tensors=manifest.tensors)
