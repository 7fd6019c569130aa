"""What an idle peer costs: it starts fast, stays small, and loads none of the heavy things."""

from __future__ import annotations

import subprocess
import sys

from tests.support.mesh_process import mesh_process


async def test_an_idle_peer_is_small_and_starts_fast(record_property):
    async with mesh_process(1) as child:
        rss = (await child.ask("rss"))["rss"]
        record_property("rss_mb", rss)
        record_property("import_s", child.hello["import_s"])
        assert rss < 105
        assert child.hello["import_s"] < 1.5  # seconds of one core; about 0.6 on an idle machine


def test_a_mesh_loads_no_torch_and_no_numba():
    code = "import sys, rollmesh_peer.mesh.host; print(*sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "transformers", "numba", "pandas"} & set(found.split())
