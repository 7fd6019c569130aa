"""The welcome desk: who has a place in the run, as connections come and go. A memory mesh, the real ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from rollmesh_learner.members.admission import Mode
from rollmesh_learner.members.nodes import Nodes
from rollmesh_learner.members.standing import Record, StandingRules
from rollmesh_learner.members.welcome import _WATCH_S, STRANGER_S, AdmissionTerms, WelcomeDesk
from rollmesh_learner.publishing.versions import Versions
from rollmesh_learner.records import restore, rows
from rollmesh_learner.records.ledger import Ledger, open_ledger
from rollmesh_peer.testing.memory_mesh import MemoryMesh, MemoryNetwork
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Head, Hello, Invite
from tests.unit.node.cards import make_card

LEARNER = Identity(b"L" * 32)
HELLO = Hello(majors=(1,), software="", name="", role="seed", engine=None, addresses=(), invite=None)
RULES = StandingRules(new_rollouts=10, probation_rollouts=50, rate_new=1.0, rate_probation=0.5, rate_steady=0.03)
PER_BLOCK = 4
ONE_BLOCK = [f"203.0.113.{host}" for host in range(1, 100)]


@dataclass
class World:
    """A desk on a network. Nobody is admitted yet."""

    network: MemoryNetwork
    mesh: MemoryMesh
    nodes: Nodes
    desk: WelcomeDesk

    @asynccontextmanager
    async def linked(self, host: str, *, key: int) -> AsyncIterator[MemoryMesh]:
        """A peer at ``host`` that is connected and has said nothing."""
        async with self.network.join(bytes([key]) * 32) as mesh:
            mesh.addresses = (f"/ip4/{host}/tcp/{4000 + len(self.nodes.all())}/p2p/{mesh.peer_id}",)
            await mesh.connect(self.mesh.addresses[0])
            yield mesh

    async def hello(self, peer: str, *, invite: bytes | None = None) -> str:
        """The code that a hello gets; empty when the peer is let in."""
        try:
            await self.desk.hello(peer, HELLO.model_copy(update={"invite": invite}).encode())
        except Refused as refused:
            return refused.code
        return ""

    def is_member(self, peer: str) -> bool:
        with suppress(Refused):
            return self.desk.member(peer).peer == peer
        return False


@asynccontextmanager
async def open_world(
    ledger: Ledger, *, known: dict[str, Record] | None = None, most: int = 100, mode: Mode = "open"
) -> AsyncIterator[World]:
    network = MemoryNetwork()
    nodes = Nodes(known or {}, max_nodes=most, rules=RULES)
    versions = Versions()
    versions.reset([Head(version=1, step=0, root=bytes(32))])
    async with network.join(LEARNER.seed) as mesh:
        registrations = await restore.load_registrations(
            ledger, per_block=PER_BLOCK, now=trio.current_time(), wall_time=1e9
        )
        desk = WelcomeDesk(
            AdmissionTerms(mode=mode, allow=(), per_block=PER_BLOCK), card=make_card(), identity=LEARNER, mesh=mesh,
            nodes=nodes, versions=versions, ledger=ledger, edges_towards_head=lambda _root: (), random=Random(0),
            registrations=registrations,
        )  # fmt: skip
        yield World(network, mesh, nodes, desk)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    async with open_ledger(folder / "ledger.sqlite") as ledger, open_world(ledger) as world:
        yield world


@pytest.fixture
async def watched(world: World) -> AsyncIterator[World]:
    """With the desk's watch, and a clock that jumps: also while the ledger writes, so nothing else may go by it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.desk.watch)
        yield world
        nursery.cancel_scope.cancel()


async def test_those_who_come_back_count_like_those_who_come(watched: World, autojump_clock: object) -> None:
    async with AsyncExitStack() as present:
        async with AsyncExitStack() as first:
            for key in range(PER_BLOCK):
                mesh = await first.enter_async_context(watched.linked(ONE_BLOCK[key], key=key))
                assert await watched.hello(mesh.peer_id) == ""
                assert await watched.hello(mesh.peer_id) == "", "its own place is not counted against it"
        for key in range(10, 10 + PER_BLOCK):
            mesh = await present.enter_async_context(watched.linked(ONE_BLOCK[key], key=key))
            assert await watched.hello(mesh.peer_id) == ""
        for key in range(PER_BLOCK):
            mesh = await present.enter_async_context(watched.linked(ONE_BLOCK[key], key=key))
            assert await watched.hello(mesh.peer_id) == "node.too_many"
        other = await present.enter_async_context(watched.linked("203.0.114.1", key=90))
        assert await watched.hello(other.peer_id) == "", "another block has places of its own"
        await trio.sleep(2 * _WATCH_S)
        assert sum(watched.is_member(peer) for peer in watched.mesh.links()) == PER_BLOCK + 1
    async with watched.linked(ONE_BLOCK[0], key=0) as back:
        assert await watched.hello(back.peer_id) == "", "the places are free again"


async def test_a_connection_without_a_hello_makes_no_member(watched: World, autojump_clock: object) -> None:
    async with watched.linked(ONE_BLOCK[0], key=1) as mesh:
        assert await watched.hello(mesh.peer_id) == ""
        assert watched.is_member(mesh.peer_id)
    async with watched.linked(ONE_BLOCK[1], key=1) as mesh:
        await trio.sleep(2 * _WATCH_S)
        assert not watched.is_member(mesh.peer_id)
        await trio.sleep(STRANGER_S + _WATCH_S)
        assert mesh.peer_id not in watched.mesh.links(), "it holds a place that nodes need"
    async with watched.linked(ONE_BLOCK[1], key=1) as mesh:
        assert await watched.hello(mesh.peer_id) == ""
        await trio.sleep(STRANGER_S + 2 * _WATCH_S)
        assert watched.is_member(mesh.peer_id)


async def test_who_is_gone_before_its_hello_is_looked_at_is_not_let_in(world: World) -> None:
    async with world.linked(ONE_BLOCK[0], key=1) as mesh:
        pass
    assert await world.hello(mesh.peer_id) == "request.timeout"
    assert not world.nodes.is_known(mesh.peer_id)
    async with world.linked("127.0.0.1", key=2) as local:
        assert await world.hello(local.peer_id) == "", "loopback has an address"


def invitation(number: int) -> bytes:
    body = Invite(token=bytes([number]) * 16).encode()
    return seal(body, run=make_card().run, kind="invite", identity=LEARNER).encode()


async def test_hellos_that_wait_for_their_invitations_do_not_pass_each_other(folder: Path) -> None:
    codes: list[str] = []
    async with (
        open_ledger(folder / "ledger.sqlite") as ledger,
        open_world(ledger, mode="invite") as world,
        AsyncExitStack() as stack,
    ):
        meshes = [
            await stack.enter_async_context(world.linked(ONE_BLOCK[key], key=key)) for key in range(PER_BLOCK + 3)
        ]

        async def join(number: int, peer: str) -> None:
            codes.append(await world.hello(peer, invite=invitation(number)))

        async with trio.open_nursery() as nursery:
            for number, mesh in enumerate(meshes):
                nursery.start_soon(join, number, mesh.peer_id)
            await trio.testing.wait_all_tasks_blocked()
        assert sorted(codes) == [""] * PER_BLOCK + ["node.too_many"] * 3

        async with trio.open_nursery() as nursery, world.linked("203.0.114.1", key=90) as gone:
            nursery.start_soon(join, 90, gone.peer_id)
            await trio.lowlevel.checkpoint()
            world.network.kill(gone.peer_id)
        assert codes[-1] == "request.timeout"
        assert not world.nodes.is_known(gone.peer_id)


async def test_loopback_is_free(world: World) -> None:
    async with AsyncExitStack() as stack:
        for key in range(5 * PER_BLOCK):
            mesh = await stack.enter_async_context(world.linked("127.0.0.1", key=key))
            assert await world.hello(mesh.peer_id) == ""


async def test_a_full_run_uses_up_no_registrations(folder: Path) -> None:
    async with open_ledger(folder / "ledger.sqlite") as ledger, open_world(ledger, most=1) as world:
        async with world.linked("127.0.0.1", key=200) as only:
            assert await world.hello(only.peer_id) == ""
            for key in range(3 * PER_BLOCK):
                async with world.linked(ONE_BLOCK[key], key=key) as mesh:
                    assert await world.hello(mesh.peer_id) == "run.full"
        world.nodes.admitted(only.peer_id).last_seen -= 1000
        async with world.linked(ONE_BLOCK[0], key=1) as mesh:
            assert await world.hello(mesh.peer_id) == ""


async def one_after_the_other(world: World, *, first_key: int) -> int:
    """New identities of one block, each gone before the next comes: how many are let in."""
    for number in range(50):
        async with world.linked(ONE_BLOCK[number], key=first_key + number) as mesh:
            if await world.hello(mesh.peer_id):
                return number
    raise AssertionError("there is no bound")


async def test_a_restart_gives_no_block_a_second_burst(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("rollmesh_learner.members.welcome.time.time", lambda: 1e9)
    async with open_ledger(folder / "ledger.sqlite") as ledger:
        async with open_world(ledger) as world:
            assert await one_after_the_other(world, first_key=0) == 2 * PER_BLOCK
        async with open_world(ledger, known=await restore.load_records(ledger)) as world:
            assert await one_after_the_other(world, first_key=100) == 0
            async with world.linked(ONE_BLOCK[0], key=0) as known:
                assert await world.hello(known.peer_id) == "", "who was let in once is no new key"


async def test_arrivals_of_long_ago_weigh_nothing(folder: Path) -> None:
    async with open_ledger(folder / "ledger.sqlite") as ledger:
        for number in range(2 * PER_BLOCK):
            put = rows.put_node(f"peer-{number}", name="", record=Record(), wall_time=1000.0, block="203.0.113.0/24")
            await ledger.commit(put)
        for passed_s, left in ((0, 0), (1800, PER_BLOCK // 2), (36_000, 2 * PER_BLOCK)):
            registrations = await restore.load_registrations(
                ledger, per_block=PER_BLOCK, now=5.0, wall_time=1000.0 + passed_s
            )
            for _ in range(left):
                registrations.register("/ip4/203.0.113.7/tcp/1", now=5.0)
            with pytest.raises(Refused):
                registrations.register("/ip4/203.0.113.7/tcp/1", now=5.0)
