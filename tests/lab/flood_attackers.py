"""One process of attackers: ``python -m tests.lab.flood_attackers ADDRESS IDENTITIES``.

Then one JSON object a line on stdin, ``{"kind": ..., "seconds": ...}``; when it is over, what came of it on stdout:
counts of what was sent, of answers, refusals by code, resets, and of being cut off or not let in.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter

import trio

from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.messages import EdgesAnswer, EdgesRequest, RunCard, Welcome
from tests.lab.flood_kinds import KINDS, Kind, hello
from tests.lab.flood_peer import FloodPeer, Gone

AGAIN_S = 0.5
"""How soon an identity that was thrown out knocks again."""
MOST_AT_A_TIME = 40
"""Acts of one identity under way; what does not end holds no more than that."""


async def flood(kind: Kind, *, address: str, identities: int, seconds: float, run: dict[str, object]) -> dict[str, int]:
    """Let ``identities`` fresh keys act for so long; the counts."""
    counts: Counter[str] = Counter()
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for index in range(identities):
                peer = FloodPeer(address, counts)
                peer.__dict__.update(run)
                nursery.start_soon(besiege, peer, kind, index / identities)
    return dict(counts.most_common())


async def besiege(peer: FloodPeer, kind: Kind, phase: float) -> None:
    """One identity, for as long as the flood lasts."""
    await trio.sleep(phase)
    while True:
        with contextlib.suppress(Gone, trio.TooSlowError, Refused):
            if kind.is_raw:
                await act_on(peer, kind)
            else:
                peer.is_deaf = False
                async with peer.connected():
                    if kind.is_member:
                        await introduce(peer)
                    await act_on(peer, kind)
        await trio.sleep(AGAIN_S)


async def act_on(peer: FloodPeer, kind: Kind) -> None:
    slots = trio.CapacityLimiter(MOST_AT_A_TIME)

    async def once() -> None:
        with contextlib.suppress(Gone, OSError, trio.BrokenResourceError):
            async with slots:
                await kind.act(peer)

    async with trio.open_nursery() as nursery:
        due = trio.current_time()
        while kind.is_raw or peer.is_up:
            if slots.available_tokens > 0:
                nursery.start_soon(once)
            due += 1 / kind.rate
            await trio.sleep_until(max(due, trio.current_time()))
        nursery.cancel_scope.cancel()


async def introduce(peer: FloodPeer) -> None:
    """Become a member."""
    answer = await peer.ask(streams.HELLO, hello())
    if answer[:1] != b"\0":
        peer.counts["not admitted"] += 1
        raise Gone
    welcome = Welcome.decode(answer[1:], limit=limits.CARD_BYTES)
    peer.admission = welcome.admission


async def look(address: str) -> dict[str, object]:
    """What every identity knows of the run: asked once."""
    peer = FloodPeer(address, Counter())
    async with peer.connected():
        welcome = Welcome.decode((await peer.ask(streams.HELLO, hello()))[1:], limit=limits.CARD_BYTES)
        sealed = Envelope.decode(welcome.card, limit=limits.CARD_BYTES)
        card = RunCard.decode(sealed.body, limit=limits.CARD_BYTES)
        raw = await peer.ask(streams.EDGES, EdgesRequest(root=None).encode())
        edges = EdgesAnswer.decode(raw[1:], limit=limits.EDGES_BYTES).edges
    return {"run": card.run, "root": welcome.head.root, "manifests": [edge.manifest for edge in edges]}


async def main(address: str, identities: int) -> None:
    run = await look(address)
    say({"ready": True})
    stdin = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
    heard = b""
    async for piece in stdin:
        *lines, heard = (heard + piece).split(b"\n")
        for line in lines:
            order = json.loads(line)
            kind = KINDS[order["kind"]]
            say(await flood(kind, address=address, identities=identities, seconds=order["seconds"], run=run))


def say(fields: dict[str, object]) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
