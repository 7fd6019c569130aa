"""Connections over real sockets and between real processes: who gets in, what is noticed, what is left behind."""

from __future__ import annotations

import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from rollmesh_peer.mesh.address import parse_peer_address
from rollmesh_peer.mesh.host import HostOptions, open_mesh
from rollmesh_peer.mesh.keeping import LinkKeeper
from rollmesh_peer.mesh.libp2p_host import swarm as swarm_module
from rollmesh_peer.mesh.libp2p_host.transport import Upgrader, dial_tcp
from rollmesh_peer.mesh.peer_cache import PeerCache
from rollmesh_protocol import limits
from rollmesh_protocol.errors import HostError, LinkLost
from rollmesh_protocol.identity import Identity
from tests.support.mesh_hostile import stock_host
from tests.support.mesh_process import mesh_process
from tests.support.mesh_worlds import eventually, seed
from tests.support.ports import free_port

ECHO = "/rollmesh/1/echo"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def listening(number, **options):
    return open_mesh(HostOptions(key_seed=seed(number), listen=LOOPBACK, **options))


def dialling(number, **options):
    return open_mesh(HostOptions(key_seed=seed(number), **options))


async def handshake(address):
    """A connection that gets as far as yamux, without a host around it."""
    target = parse_peer_address(address)
    upgrader = Upgrader(create_new_key_pair(), is_welcome=lambda _peer: True, report=lambda *_a, **_k: None)
    raw = await dial_tcp(target.endpoint)
    peer_id = ID.from_base58(target.peer)
    try:
        secured = await upgrader.upgrade_security(raw, True, peer_id)
        await upgrader.upgrade_connection(secured, peer_id)
    except BaseException:
        await raw.close()
        raise
    return raw


async def echoes(mesh, peer):
    stream = await mesh.open_stream(peer, ECHO)
    await stream.send(b"x")
    assert await stream.receive(1) == b"x"
    await stream.reset()


# --- admission -------------------------------------------------------------------------------------------------------
async def test_row_1_slots_are_given_back(monkeypatch):
    """In the library 250 connections in a host's life use up all slots, whether or not they still live."""
    monkeypatch.setattr(limits, "ARRIVALS_BURST_IN_ALL", 1000)
    async with listening(1, max_connections=16) as mesh, dialling(2) as honest:
        with trio.fail_after(30):
            for _ in range(260):
                raw = await handshake(mesh.addresses[0])
                await raw.close()
        await eventually(lambda: not mesh.links())
        await honest.connect(mesh.addresses[0])
        assert list(mesh.links()) == [honest.peer_id]
        await eventually(lambda: (mesh._swarm._inbound, mesh._swarm._handshakes) == (1, 0))


async def test_strangers_leave_slots_for_our_own_dials():
    async with listening(1, max_connections=limits.RESERVED_CONNECTIONS + 3) as mesh, listening(2) as other:
        raws = [await handshake(mesh.addresses[0]) for _ in range(3)]
        await eventually(lambda: len(mesh.links()) == 3)
        with pytest.raises(Exception, match="."):
            await handshake(mesh.addresses[0])
        await mesh.connect(other.addresses[0])
        assert len(mesh.links()) == 4
        for raw in raws:
            await raw.close()
        await eventually(lambda: len(mesh.links()) == 1)
        await (await handshake(mesh.addresses[0])).close()


async def test_one_address_block_gets_its_share(monkeypatch):
    monkeypatch.setattr(swarm_module, "block_of", lambda _endpoint: "203.0.113.0/24")
    async with listening(1, per_block=2) as mesh:
        raws = [await handshake(mesh.addresses[0]) for _ in range(2)]
        await eventually(lambda: len(mesh.links()) == 2)
        with pytest.raises(Exception, match="."):
            await handshake(mesh.addresses[0])
        await raws[0].close()
        await eventually(lambda: len(mesh.links()) == 1)
        await trio.sleep(0.05)
        await (await handshake(mesh.addresses[0])).close()
        await raws[1].close()


async def test_one_address_block_shakes_few_hands_at_a_time(monkeypatch):
    monkeypatch.setattr(swarm_module, "block_of", lambda _endpoint: "203.0.113.0/24")
    async with listening(1) as mesh:
        endpoint = parse_peer_address(mesh.addresses[0]).endpoint
        silent = [await trio.open_tcp_stream(endpoint.host, endpoint.port) for _ in range(limits.HANDSHAKES_PER_BLOCK)]
        await eventually(lambda: mesh._swarm._handshakes == limits.HANDSHAKES_PER_BLOCK)
        with pytest.raises(Exception, match="."):
            await handshake(mesh.addresses[0])
        monkeypatch.setattr(swarm_module, "block_of", lambda _endpoint: "198.51.100.0/24")
        await (await handshake(mesh.addresses[0])).close()
        for stream in silent:
            await stream.aclose()


async def test_one_address_block_arrives_at_a_bounded_pace(monkeypatch):
    monkeypatch.setattr(swarm_module, "block_of", lambda _endpoint: "203.0.113.0/24")
    monkeypatch.setattr(limits, "ARRIVALS_BURST", 5)
    monkeypatch.setattr(limits, "ARRIVALS_PER_BLOCK_S", 0.1)
    async with listening(1) as mesh:
        for _ in range(5):
            await (await handshake(mesh.addresses[0])).close()
        with pytest.raises(Exception, match="."):
            await handshake(mesh.addresses[0])


async def test_a_silent_stranger_gives_way_to_a_newcomer(monkeypatch):
    """Else a few dozen connections without a word keep everybody out, eight seconds at a time."""
    monkeypatch.setattr(limits, "SLOW_HANDSHAKE_S", 0.2)
    async with listening(1) as mesh:
        mesh._swarm.caps = swarm_module.Caps(connections=64, per_block=64, handshakes=3)
        endpoint = parse_peer_address(mesh.addresses[0]).endpoint
        silent = [await trio.open_tcp_stream(endpoint.host, endpoint.port) for _ in range(3)]
        await eventually(lambda: mesh._swarm._handshakes == 3)
        await trio.sleep(0.3)
        await (await handshake(mesh.addresses[0])).close()
        with trio.fail_after(5):
            while await silent[0].receive_some(100):  # the oldest one is let go
                pass
        for stream in silent:
            await stream.aclose()


async def test_arrivals_are_bounded_in_all(monkeypatch):
    """Also from loopback, where no address counts."""
    monkeypatch.setattr(limits, "ARRIVALS_BURST_IN_ALL", 5)
    monkeypatch.setattr(limits, "ARRIVALS_S", 0.1)
    async with listening(1) as mesh:
        for _ in range(5):
            await (await handshake(mesh.addresses[0])).close()
        with pytest.raises(Exception, match="."):
            await handshake(mesh.addresses[0])


async def test_silent_strangers_are_bounded_in_number_and_in_time(monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_S", 2.0)
    async with listening(1) as mesh:
        mesh._swarm.caps = swarm_module.Caps(connections=64, per_block=64, handshakes=3)
        endpoint = parse_peer_address(mesh.addresses[0]).endpoint
        silent = [await trio.open_tcp_stream(endpoint.host, endpoint.port) for _ in range(3)]
        await eventually(lambda: mesh._swarm._handshakes == 3)
        with pytest.raises(Exception, match="."):
            await handshake(mesh.addresses[0])
        await eventually(lambda: mesh._swarm._handshakes == 0)
        await (await handshake(mesh.addresses[0])).close()
        for stream in silent:
            await stream.aclose()


async def test_one_peer_holds_two_connections_at_most():
    async with listening(1) as mesh:
        keys = create_new_key_pair()
        target = parse_peer_address(mesh.addresses[0])
        raws = []
        for _ in range(5):
            upgrader = Upgrader(keys, is_welcome=lambda _peer: True, report=lambda *_a, **_k: None)
            raw = await dial_tcp(target.endpoint)
            secured = await upgrader.upgrade_security(raw, True, ID.from_base58(target.peer))
            await upgrader.upgrade_connection(secured, ID.from_base58(target.peer))
            raws.append(raw)
        await eventually(lambda: len(mesh._swarm.get_connections()) == limits.MAX_CONNECTIONS_PER_PEER)
        for raw in raws:
            await raw.close()


async def test_two_peers_that_dial_each_other_at_once_stay_linked():
    async with listening(1) as a, listening(2) as b:
        for mesh in (a, b):
            mesh.serve(ECHO, echo)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.connect, b.addresses[0])
            nursery.start_soon(b.connect, a.addresses[0])
        await trio.sleep(0.5)
        await echoes(a, b.peer_id)
        await echoes(b, a.peer_id)


async def echo(stream):
    while True:
        await stream.send(await stream.receive(100))


# --- silence, loss and return ----------------------------------------------------------------------------------------
async def test_row_6_a_stopped_process_is_noticed_even_while_a_write_is_stuck():
    async with AsyncExitStack() as stack:
        idle = await stack.enter_async_context(mesh_process(1))
        busy = await stack.enter_async_context(mesh_process(2))
        mesh = await stack.enter_async_context(dialling(3))
        await mesh.connect(idle.address)
        await mesh.connect(busy.address)
        streams = [await mesh.open_stream(busy.peer, "/rollmesh/1/sink") for _ in range(50)]
        idle.stop()
        busy.stop()
        stopped = trio.current_time()
        noticed = {}

        async def notice(child):
            await mesh.wait_link_lost(child.peer)
            noticed[child.peer] = trio.current_time() - stopped

        async def push(stream):
            with pytest.raises(LinkLost):
                await stream.send(bytes(limits.STREAM_WINDOW_BYTES - 100))
                await stream.receive(1)

        with trio.fail_after(25):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(notice, idle)
                nursery.start_soon(notice, busy)
                for stream in streams:
                    nursery.start_soon(push, stream)
        assert max(noticed.values()) < limits.SILENT_S + limits.PROBE_S + 5


async def test_a_quiet_link_lives_on(monkeypatch):
    monkeypatch.setattr(limits, "PROBE_S", 0.2)
    monkeypatch.setattr(limits, "SILENT_S", 1.5)
    async with listening(1) as a, dialling(2) as b:
        await b.connect(a.addresses[0])
        await trio.sleep(4)
        assert len(a.links()) == len(b.links()) == 1


async def test_a_killed_process_is_noticed_at_once():
    async with mesh_process(1) as child, dialling(2) as mesh:
        await mesh.connect(child.address)
        stream = await mesh.open_stream(child.peer, "/rollmesh/1/sink")
        await trio.sleep(0.1)
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.kill)
            with pytest.raises(LinkLost):
                await stream.receive(1)
            await mesh.wait_link_lost(child.peer)
        assert trio.current_time() - started < 5, "it is not silence that tells"


async def test_row_7_a_learner_that_restarts_is_found_again_with_nobody_acting(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "BACKOFF_MOST_S", 1.0)  # else it grows for as long as the process takes to start
    port = free_port()
    async with dialling(2) as mesh, trio.open_nursery() as nursery:
        cache = PeerCache(tmp_path / "peers.json")
        async with mesh_process(1, port=port) as child:
            keeper = LinkKeeper(mesh, ["/ip4/127.0.0.1/tcp/9/p2p/" + child.peer, child.address], cache=cache)
            nursery.start_soon(keeper.run)
            with trio.fail_after(20):
                await keeper.wait_linked()
            assert keeper.waiting_for == ""
            await child.kill()
        await eventually(lambda: "does not answer" in keeper.waiting_for, within=10)
        assert "the learner at /ip4/127.0.0.1/tcp/" in keeper.waiting_for
        async with mesh_process(1, port=port) as child:
            returned = trio.current_time()
            with trio.fail_after(20):
                await keeper.wait_linked()
            assert trio.current_time() - returned < 5
            await echoes(mesh, child.peer)
        assert PeerCache(tmp_path / "peers.json").addresses_of(child.peer) == (child.address,)
        nursery.cancel_scope.cancel()


async def test_row_7_a_failed_dial_is_not_remembered():
    """The library refuses a peer locally for 60 s after one failure."""
    port = free_port()
    async with dialling(2) as mesh:
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_of(1)}"
        for _ in range(2):
            with pytest.raises(LinkLost, match="does not answer"):
                await mesh.connect(address)
        async with open_mesh(HostOptions(key_seed=seed(1), listen=(f"/ip4/127.0.0.1/tcp/{port}",))):
            assert await mesh.connect(address) == peer_of(1)


async def test_a_dial_that_hangs_ends_in_time(monkeypatch):
    monkeypatch.setattr(limits, "DIAL_S", 0.4)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with dialling(2) as mesh:
        with pytest.raises(LinkLost, match="does not answer within"), trio.fail_after(6):
            await mesh.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_of(1)}")
    await listeners[0].aclose()


async def test_names_and_ipv6_can_be_dialled():
    if not has_ipv6():
        pytest.skip("no IPv6 on loopback")
    options = HostOptions(key_seed=seed(1), listen=("/ip6/::1/tcp/0", "/ip4/127.0.0.1/tcp/0"))
    async with open_mesh(options) as mesh, dialling(2) as other:
        six, four = mesh.addresses
        await other.connect(six)
        await eventually(mesh.links)
        assert next(iter(mesh.links().values())).address.startswith("/ip6/::1/tcp/")
        await other.disconnect(mesh.peer_id)
        await other.connect(four.replace("/ip4/127.0.0.1", "/dns4/localhost"))
        with pytest.raises(LinkLost, match="does not answer"):
            await other.connect(f"/dns4/nowhere.invalid/tcp/1/p2p/{peer_of(5)}")


# --- ports and what is left ------------------------------------------------------------------------------------------
async def test_row_8_a_busy_port_is_an_error_in_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=f"port {port} is in use"):
            async with open_mesh(HostOptions(key_seed=seed(1), listen=(f"/ip4/127.0.0.1/tcp/{port}",))):
                pass
    with pytest.raises(HostError, match="not an address of this machine"):
        async with open_mesh(HostOptions(key_seed=seed(1), listen=("/ip4/203.0.113.7/tcp/4700",))):
            pass


async def test_row_8_two_daemons_never_share_a_port():
    """The library's listeners set SO_REUSEPORT: connections would go to either."""
    async with listening(1) as mesh:
        listen = mesh.addresses[0].partition("/p2p/")[0]
        with pytest.raises(HostError, match="in use"):
            async with open_mesh(HostOptions(key_seed=seed(2), listen=(listen,))):
                pass
    async with stock_host(listen=True) as host:
        listen = str(host.get_addrs()[0]).partition("/p2p/")[0]
        with pytest.raises(HostError, match="in use"):
            async with open_mesh(HostOptions(key_seed=seed(2), listen=(listen,))):
                pass


async def test_row_9_nothing_of_a_mesh_stays_in_the_process():
    async with listening(3) as other:
        await trio.sleep(0.1)
        descriptors = num_descriptors()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(3):
            async with listening(1) as mesh:
                listen = mesh.addresses[0].partition("/p2p/")[0]
                await mesh.connect(other.addresses[0])
                await other.connect(mesh.addresses[0])
            async with open_mesh(HostOptions(key_seed=seed(2), listen=(listen,))):
                pass
        await eventually(lambda: not other.links())
        await eventually(lambda: num_descriptors() <= descriptors)
        await eventually(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)


async def test_row_9_closing_takes_no_time_with_many_links():
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(dialling(number, gossip=False)) for number in range(2, 22)]
        async with listening(1) as mesh:
            for other in others:
                await other.connect(mesh.addresses[0])
            await eventually(lambda: len(mesh.links()) == 20)
            started = trio.current_time()
        assert trio.current_time() - started < 5


async def test_row_14_an_error_inside_comes_out_as_it_is():
    with pytest.raises(HostError, match="the disk is full"):
        async with listening(1):
            raise HostError("the disk is full")
    with trio.move_on_after(0.3) as scope:
        async with listening(1):
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_wildcard_is_announced_as_addresses_that_can_be_dialled():
    options = HostOptions(key_seed=seed(1), listen=("/ip4/0.0.0.0/tcp/0",), announce=("/dns4/rl.example.org/tcp/4700",))
    async with open_mesh(options) as mesh, dialling(2) as other:
        assert mesh.addresses[0] == f"/dns4/rl.example.org/tcp/4700/p2p/{mesh.peer_id}"
        assert not any("0.0.0.0" in address for address in mesh.addresses)
        await other.connect(mesh.addresses[-1])


async def test_the_same_seed_is_the_same_peer_in_both_libraries():
    async with dialling(77) as mesh:
        assert mesh.peer_id == peer_of(77)
    assert "key_seed" not in repr(HostOptions(key_seed=seed(77)))


def peer_of(number):
    return Identity(seed(number)).peer


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def num_descriptors():
    if sys.platform != "linux":
        pytest.skip("counts descriptors in /proc")
    return len(list(Path("/proc/self/fd").iterdir()))
