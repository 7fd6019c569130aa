"""A mesh peer in a process of its own, for tests that kill it, stop it or weigh it.

``python -m tests.support.mesh_child SEED PORT [ADDRESS]`` listens on loopback (PORT 0: any), dials ADDRESS if given,
and prints one line of JSON when it is up. It then answers each line on stdin: ``rss`` -> its resident megabytes,
``links`` -> its peers, ``dial ADDRESS`` -> the peer. End of stdin ends it.

Protocols: ``/rollmesh/1/echo`` sends every frame back, ``/rollmesh/1/sink`` holds its stream without reading.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

_started = time.process_time()

import trio  # noqa: E402

from rollmesh_peer.mesh.host import HostOptions, open_mesh  # noqa: E402
from rollmesh_protocol.errors import LinkLost  # noqa: E402

_import_s = time.process_time() - _started
MAX = 1 << 26


def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def say(**words):
    print(json.dumps(words), flush=True)


async def main(number, port, address):
    async def echo(stream):
        while True:
            await stream.send(await stream.receive(MAX))

    async def sink(stream):
        await trio.sleep(60)
        await stream.reset()

    options = HostOptions(key_seed=number.to_bytes(32, "big"), listen=(f"/ip4/127.0.0.1/tcp/{port}",))
    async with open_mesh(options) as mesh:
        mesh.serve("/rollmesh/1/echo", echo)
        mesh.serve("/rollmesh/1/sink", sink)
        if address:
            await mesh.connect(address)
        say(address=mesh.addresses[0], peer=mesh.peer_id, import_s=_import_s, rss=rss_mb())
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            word, _, rest = line.strip().partition(" ")
            if word == "rss":
                say(rss=rss_mb())
            elif word == "links":
                say(links=sorted(mesh.links()))
            elif word == "dial":
                try:
                    say(peer=await mesh.connect(rest))
                except LinkLost as error:
                    say(error=str(error))


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
