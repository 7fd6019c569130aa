"""The scoring child: ``python -m rollmesh_peer.children.scorer``. It recomputes rewards of answers by strangers.

It only passes on: the daemon's calls go to a zygote that was forked off before this process had a second thread, and
that does everything in a ``sandbox``. Verbs: ``open`` and ``score``, as ``scoring`` makes them.
"""

from __future__ import annotations

from rollmesh_peer.children.child import run_child, take_pipes
from rollmesh_peer.children.plugins import fix_hash_seed
from rollmesh_peer.children.zygote import Zygote


def main() -> None:
    """Serve the daemon until it goes away."""
    fix_hash_seed()
    take_pipes()
    zygote = Zygote()
    run_child({"open": lambda body: zygote.call("open", body), "score": lambda body: zygote.call("score", body)})


if __name__ == "__main__":
    main()
