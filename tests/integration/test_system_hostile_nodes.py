"""Hostile nodes against a real learner: each is refused with the right code, and an honest node beside it works on.

All attacks run against one learner process, which trains on what an honest node process gives it the whole time. After
every test that node must have had more work accepted and none refused, and the learner must not have failed anywhere.
"""

from __future__ import annotations

import ast
import math
import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest
import trio
import zstandard
from libp2p.exceptions import BaseLibp2pError

from rollmesh_protocol import limits, streams
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import LinkLost, Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import ChunkRequest, LeaseRequest
from rollmesh_protocol.rollout import SampleResult, Segment
from rollmesh_protocol.status import NodeStatus, StatusRequest
from tests.support.attacker import (
    PLAIN_TOKEN,
    Attacker,
    Studio,
    Weight,
    open_attacker,
    open_studio,
    result_of,
    sample_of,
)
from tests.support.mesh_hostile import DATA, attack, begin, frame, is_closed, stock_host
from tests.support.system import System, open_system

pytestmark = pytest.mark.timeout(400)
WHOLE = [PLAIN_TOKEN] * 12
"""A completion of the length that the run leases, of the letter A."""
END = 258
VOCABULARY = 260
ALL_STREAMS = (
    streams.HELLO, streams.LEASE, streams.SUBMIT, streams.RETURN, streams.MANIFEST, streams.EDGES, streams.PEERS,
    streams.HAVE, streams.CHUNK, streams.STATUS,
)  # fmt: skip
HEARTBEAT = LeaseRequest(groups=0, version_held=0, root_held=None, tokens_per_s=0, waiting_for="").encode()
FORM = {"request.invalid", "request.too_large", "result.schema"}
"""Codes for what does not even look like a message."""


SETTINGS = (
    "leases.max_duration_s=20",
    "training.kl=0.3",  # else the model soon writes the same letters whatever the seed, and no seed is wrong any more
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run without end, and an honest node that has begun to work for it."""

    async def begin(system: System) -> None:
        await system.add_node("honest")
        await system.until_run(lambda run: run.step >= 2, timeout_s=100)

    with open_system(tmp_path_factory.mktemp("hostile"), *SETTINGS, steps=1_000_000) as system:
        trio.run(begin, system)
        yield system


@pytest.fixture
async def system(run: System):
    """The run, and afterwards the proof that neither the honest node nor the learner has noticed anything."""
    before = await honest(run)
    yield run
    assert run.learner.is_alive and run.nodes["honest"].is_alive
    after = await run.until_node("honest", lambda status: status.accepted > before.accepted)
    assert not run.accused(after.peer) and after.standing.state in ("new", "probation", "full")
    assert "Traceback" not in run.learner.log, run.learner.tail(200)


@pytest.fixture
async def attacker(system: System):
    async with open_attacker(await system.join_line()) as one:
        yield one


async def honest(system: System) -> NodeStatus:
    """What the honest node says of itself."""
    return await system.until_node("honest", lambda status: status.standing is not None)


async def standing_of(system: System, attacker: Attacker, condition=lambda standing: True):
    """The first standing of an attacker for which ``condition`` holds."""
    run = await system.until_run(lambda run: any(p.peer == attacker.peer and condition(p.standing) for p in run.peers))
    return next(peer.standing for peer in run.peers if peer.peer == attacker.peer)


async def quarantine(system: System, attacker: Attacker):
    return await standing_of(system, attacker, lambda standing: standing.state == "quarantined")


async def judged(system: System, attacker: Attacker):
    """Its standing once nothing of it waits for a verdict."""
    waiting = "SELECT 1 FROM rollouts WHERE node = ? AND state IN ('scoring', 'auditing')"
    with trio.fail_after(100):
        while system.rows(waiting, attacker.peer):
            await trio.sleep(0.1)
    ((audits,),) = system.rows("SELECT count(*) FROM audits WHERE node = ?", attacker.peer)
    return await standing_of(system, attacker, lambda s: s.state == "quarantined" or s.audited >= audits)


async def refused_to(attacker: Attacker, sealed: bytes) -> str:
    """The code for a result that is not even looked at."""
    return await attacker.refusal(streams.SUBMIT, sealed)


# --- work that was not done as ordered -------------------------------------------------------------------------------
async def outcome(system: System, studio: Studio, **changes: object) -> str:
    """What becomes of a fresh node that draws with the real engine and the right weights, but for one thing."""
    async with open_attacker(await system.join_line()) as one:
        while True:  # a lease that tops up a group may be for one sample alone
            lease = await one.take_lease(root=lambda: studio.newest)
            receipt = await one.submit(await studio.draw(lease, **changes))
            assert receipt.code in (None, "lease.expired", "result.stale"), receipt
            standing = await judged(system, one)
            if standing.state == "quarantined" or standing.audited >= 4:
                break
        if standing.state != "quarantined":
            return "passed"
        assert await one.refusal(streams.LEASE, HEARTBEAT) == "node.quarantined"
        return standing.reason.partition(":")[0]


async def test_work_that_was_not_sampled_as_ordered_ends_in_quarantine(system: System, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def edited(tokens: np.ndarray) -> np.ndarray:
        places = rng.choice(len(tokens) - 1, size=min(3, len(tokens) - 1), replace=False)
        tokens[places] = rng.integers(0, 256, size=len(places))
        return tokens

    def stopped(tokens: np.ndarray) -> np.ndarray:
        return np.append(tokens[:4], np.uint32(END)).astype(np.uint32)

    cheats = {
        "nothing": {},
        "another seed": {"seed_shift": 1},
        "another prompt": {"prompt": np.frombuffer(b"Once upon a time there was", np.uint8).astype(np.uint32)},
        "a trimmed prompt": {"prompt": np.array([PLAIN_TOKEN], np.uint32)},
        "edited tokens": {"edit": edited},
        "an early end": {"edit": stopped},
    }
    found: dict[str, str] = {}

    async def cheat(what: str) -> None:
        found[what] = await outcome(system, studio, **cheats[what])

    join = await system.join_line()
    async with (
        open_attacker(join, gossip=True) as scout,
        open_studio(scout, tmp_path / "studio") as studio,
        trio.open_nursery() as nursery,
    ):
        for what in cheats:
            nursery.start_soon(cheat, what)
    assert found == {**dict.fromkeys(cheats, "result.sampling"), "nothing": "passed"}


async def test_what_was_trained_on_stays_and_what_waits_goes(system: System, tmp_path: Path) -> None:
    """A node that worked well and then cheats: its consumed rollouts count, everything else of it is void."""
    join = await system.join_line()
    trained = "SELECT 1 FROM rollouts WHERE node = ? AND state IN ('assigned', 'consumed')"
    async with (
        open_attacker(join, gossip=True) as scout,
        open_studio(scout, tmp_path / "studio") as studio,
        open_attacker(join) as one,
    ):
        with trio.fail_after(120):
            while not system.rows(trained, one.peer):
                lease = await one.take_lease(root=lambda: studio.newest)
                await one.submit(await studio.draw(lease))
        lease = await one.take_lease(root=lambda: studio.newest)
        accepted = await one.submit(await studio.draw(lease))
        assert await refused_to(one, one.seal(result_of(lease).encode())) == "lease.reused"
        await quarantine(system, one)
        states = dict(system.rows("SELECT state, count(*) FROM rollouts WHERE node = ? GROUP BY state", one.peer))
        assert accepted.accepted and states.keys() <= {"assigned", "consumed", "void", "stale"}
        assert states.get("assigned", 0) + states.get("consumed", 0) > 0


# --- results that the cheap checks refuse ----------------------------------------------------------------------------
NAN, INFINITE = [math.nan], [math.inf]
ROOT = b"\x07" * 32

BAD_SAMPLES = {
    "NaN log-probabilities": ("result.logprob", {"logprobs": NAN * 12}),
    "one NaN": ("result.logprob", {"logprobs": [-1.0] * 11 + NAN}),
    "infinite log-probabilities": ("result.logprob", {"logprobs": INFINITE * 12}),
    "impossible tokens": ("result.logprob", {"logprobs": [-math.inf] * 12}),
    "log-probabilities above zero": ("result.logprob", {"logprobs": [0.01] * 12}),
    "a token beyond the vocabulary": ("result.tokens", {"tokens": [*WHOLE[:-1], VOCABULARY]}),
    "the largest token id there is": ("result.tokens", {"tokens": [*WHOLE[:-1], 2**32 - 1]}),
    "nothing": ("result.length", {"tokens": []}),
    "longer than leased": ("result.length", {"tokens": WHOLE + WHOLE[:1]}),
    "an early stop without the end token": ("result.finish", {"tokens": WHOLE[:5], "finish": "stop"}),
    "cut short of the limit": ("result.finish", {"tokens": WHOLE[:5], "finish": "length"}),
    "tokens after the end": ("result.finish", {"tokens": [*WHOLE[:5], END, *WHOLE[:6]]}),
    "an end that is called a cut": ("result.finish", {"tokens": [*WHOLE[:11], END], "finish": "length"}),
    "weights that nobody leased": ("result.root", {"segments": (Segment(first_token=0, root=ROOT),)}),
    "fewer log-probabilities than tokens": ("result.schema", {"logprobs": [-1.0] * 11}),
}  # fmt: skip


async def test_a_result_that_breaks_a_rule_is_refused_with_its_code(system: System) -> None:
    found: dict[str, str | None] = {}
    for what, (_, changes) in BAD_SAMPLES.items():
        async with open_attacker(await system.join_line()) as one:
            lease = await one.take_lease()
            samples = [sample_of(lease, sample.index) for sample in lease.samples]
            samples[-1] = sample_of(lease, samples[-1].index, **changes)
            receipt = await one.submit(result_of(lease, samples))
            assert receipt.detail and receipt.accepted == () and receipt.standing.rejected == len(samples)
            found[what] = receipt.code
    assert found == {what: code for what, (code, _) in BAD_SAMPLES.items()}


async def test_samples_that_were_not_leased_are_refused(attacker: Attacker) -> None:
    for take in (
        lambda samples: samples[:-1],
        lambda samples: [*samples, samples[-1].model_copy(update={"index": 200})],
        lambda samples: [*samples[:-1], samples[0]],
        lambda samples: [*samples, samples[0]],
    ):
        lease = await attacker.take_lease()
        while len(lease.samples) < 2:  # one that tops up a group
            lease = await attacker.take_lease()
        samples = take([sample_of(lease, sample.index) for sample in lease.samples])
        receipt = await attacker.submit(result_of(lease, samples))
        assert receipt.code == "result.samples"


async def test_half_tokens_and_two_segments_are_refused(attacker: Attacker) -> None:
    lease = await attacker.take_lease()
    halves = [
        SampleResult(
            index=sample.index, tokens=bytes(47), logprobs=bytes(48), finish="length",
            segments=(Segment(first_token=0, root=lease.root),),
        )
        for sample in lease.samples
    ]  # fmt: skip
    assert (await attacker.submit(result_of(lease, halves))).code == "result.schema"
    lease = await attacker.take_lease()
    swap = (Segment(first_token=0, root=lease.root), Segment(first_token=6, root=ROOT))
    samples = [sample_of(lease, sample.index, segments=swap) for sample in lease.samples]
    assert (await attacker.submit(result_of(lease, samples))).code == "result.root"


async def test_envelopes_that_do_not_hold(system: System, attacker: Attacker) -> None:
    lease = await attacker.take_lease()
    body = result_of(lease).encode()
    good = attacker.seal(body)
    forged = Envelope.decode(good, limit=limits.RESULT_BYTES).model_copy(update={"sig": bytes(64)}).encode()
    other = Envelope.decode(good, limit=limits.RESULT_BYTES).model_copy(update={"body": body + b"\0"}).encode()
    signature = {
        "another key": attacker.seal(body, by=Identity(secrets.token_bytes(32))),
        "no signature": forged,
        "the signature of another body": other,
        "another run": attacker.seal(body, run="another-run"),
        "another kind": attacker.seal(body, kind="lease"),
    }
    for what, sealed in signature.items():
        assert await refused_to(attacker, sealed) == "result.signature", what
    assert await refused_to(attacker, body) == "result.schema", "a body without an envelope"
    assert await refused_to(attacker, b"") == "result.schema", "nothing"
    assert (await standing_of(system, attacker)).state == "new", "one short of too many in a row"


async def test_a_node_has_no_say_in_its_reward(attacker: Attacker) -> None:
    lease = await attacker.take_lease()
    fields = result_of(lease).model_dump()
    assert await refused_to(attacker, attacker.seal(msgpack.packb({**fields, "reward": 1.0}))) == "result.schema"
    fields["samples"] = [{**sample, "reward": 1.0} for sample in fields["samples"]]
    assert await refused_to(attacker, attacker.seal(msgpack.packb(fields))) == "result.schema"


async def test_eight_refused_results_in_a_row_are_too_many(system: System, attacker: Attacker) -> None:
    for _ in range(8):
        assert await refused_to(attacker, b"junk") == "result.schema"
    assert (await quarantine(system, attacker)).reason.startswith("result.schema")
    assert await refused_to(attacker, b"junk") == "node.quarantined"


# --- leases of others, and leases twice ------------------------------------------------------------------------------
async def test_leases_that_are_not_ones_own(system: System, attacker: Attacker) -> None:
    async with open_attacker(await system.join_line()) as other:
        theirs = await other.take_lease()
        assert await refused_to(attacker, attacker.seal(result_of(theirs).encode())) == "lease.other_node"
        unknown = theirs.model_copy(update={"lease_id": secrets.token_bytes(16)})
        assert await refused_to(attacker, attacker.seal(result_of(unknown).encode())) == "lease.unknown"
        assert await attacker.give_back([theirs]) == 0, "nor can it be given back for somebody else"
        assert await other.give_back([theirs]) == 1


async def test_a_replay_gets_the_same_receipt_and_other_bytes_are_the_end(system: System, attacker: Attacker) -> None:
    lease = await attacker.take_lease()
    bad = [sample_of(lease, sample.index, logprobs=NAN * 12) for sample in lease.samples]
    sealed = attacker.seal(result_of(lease, bad).encode())
    receipts = [await attacker.ask(streams.SUBMIT, sealed) for _ in range(3)]
    assert len(set(receipts)) == 1
    assert (await standing_of(system, attacker)).rejected == len(bad), "a replay counts once"
    other = attacker.seal(result_of(lease).encode())
    assert await refused_to(attacker, other) == "lease.reused"
    standing = await quarantine(system, attacker)
    assert standing.reason.startswith("lease.reused")


async def test_a_stolen_result_is_worth_nothing(system: System, attacker: Attacker) -> None:
    """A result copied from somebody else's wire, envelope and all, or opened and signed again."""
    async with open_attacker(await system.join_line()) as other:
        lease = await other.take_lease()
        bad = [sample_of(lease, sample.index, logprobs=NAN * 12) for sample in lease.samples]
        body = result_of(lease, bad).encode()
        await other.send(other.seal(body))
        assert await refused_to(attacker, other.seal(body)) == "result.signature"
        assert await refused_to(attacker, attacker.seal(body)) == "lease.other_node"


async def test_out_of_the_run_means_out_of_everything(system: System, attacker: Attacker) -> None:
    """In quarantine: no hello, no work, no weights; what it holds goes to others, with the same seeds."""
    kept, spoiled = (await attacker.take_leases(1)), None
    (spoiled,) = kept
    bad = [sample_of(spoiled, sample.index, logprobs=NAN * 12) for sample in spoiled.samples]
    await attacker.submit(result_of(spoiled, bad))
    lease = await attacker.take_lease()
    assert await refused_to(attacker, attacker.seal(result_of(spoiled).encode())) == "lease.reused"
    for protocol, request in {
        streams.HELLO: None,
        streams.LEASE: LeaseRequest(groups=1, version_held=1, root_held=lease.root, tokens_per_s=1, waiting_for=""),
        streams.CHUNK: ChunkRequest(manifest=bytes(32), indices=(0,)),
    }.items():
        with pytest.raises(Refused) as refused:
            await (attacker.hello() if request is None else attacker.ask(protocol, request.encode()))
        assert refused.value.code == "node.quarantined", protocol
        assert "lease.reused" in refused.value.detail or protocol == streams.CHUNK
    async with open_attacker(await system.join_line(), identity=attacker.identity, hello=False) as again:
        with pytest.raises(Refused) as refused:
            await again.hello()
        assert refused.value.code == "node.quarantined"
    assert system.rows("SELECT state FROM leases WHERE lease_id = ?", lease.lease_id) == [("void",)]
    assert system.rows("SELECT count(*) FROM leases WHERE node = ? AND state = 'open'", attacker.peer) == [(0,)]
    with trio.fail_after(120):
        while not system.rows(
            "SELECT 1 FROM leases l JOIN rollouts r ON r.lease_id = l.lease_id"
            " WHERE l.group_id = ? AND l.node != ? AND r.seed = ?",
            lease.group, attacker.peer, lease.samples[0].seed.to_bytes(8, "little"),
        ):  # fmt: skip
            await trio.sleep(0.2)
    attacker.held.clear()


# --- bytes that are no messages --------------------------------------------------------------------------------------
BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
"""A quarter of a gigabyte of zeros in some kilobytes."""

GARBAGE = {
    "nothing": b"",
    "zeros": bytes(1000),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "noise": np.random.default_rng(2).bytes(10_000),
    "nested arrays": b"\x91" * 10_000,
    "nested maps": b"\x81\xa1a" * 4_000,
    "an array of 2^32": b"\xdd\xff\xff\xff\xff",
    "a text of 2^32": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "a zstandard bomb": BOMB,
    "a bomb in a field": msgpack.packb({"run": "x", "body": BOMB}),
    "one key twice": b"\x82\xa1a\x01\xa1a\x02",
    "an extension type": b"\x81\xa1a\xc7\x00\x7f",
    "another record": StatusRequest(page=0).encode() + b"\0",
}


async def test_garbage_on_every_stream_is_refused_in_words(system: System) -> None:
    weight = Weight(system.learner.pid)
    for what, garbage in GARBAGE.items():
        async with open_attacker(await system.join_line()) as one:
            for protocol in ALL_STREAMS:
                assert await one.refusal(protocol, garbage) in FORM, (what, protocol)
            assert await refused_to(one, one.seal(garbage)) == "result.schema", f"{what}, inside an envelope"
    assert weight.growth_mib < 30


def test_nothing_that_a_node_sends_is_decompressed() -> None:
    """The only module that knows a decompressor is the patch codec, and the learner only encodes patches."""
    root = Path(__file__).parents[2]
    by_name = {"zstandard": set(), "decoded": set()}
    for path in [*root.glob("protocol/*/**/*.py"), *root.glob("node/*/**/*.py"), *root.glob("learner/*/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            for name in by_name.keys() & set(".".join(names).split(".")):
                by_name[name].add(path.stem)
    assert by_name == {"zstandard": {"codec"}, "decoded": {"worker"}}


async def test_a_hundred_megabytes_are_refused_by_their_header(system: System, attacker: Attacker) -> None:
    weight = Weight(system.learner.pid)
    zeros = bytes(100 << 20)
    for protocol in ALL_STREAMS:
        assert await attacker.refusal(protocol, zeros) == "request.too_large", protocol
    assert weight.growth_mib < 10


async def test_a_million_small_values_never_become_objects(system: System, attacker: Attacker) -> None:
    weight = Weight(system.learner.pid)
    million = b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\xc0" * 1_000_000
    many = b"\xdc\xff\xff" + b"\xc0" * 65_535
    for message in (million, many, msgpack.packb({"samples": [{}] * 60_000})):
        assert await refused_to(attacker, message) == "result.schema"
        assert await refused_to(attacker, attacker.seal(message)) == "result.schema"
    assert weight.growth_mib < 20


async def test_the_largest_results_are_bounded_together(system: System, attacker: Attacker) -> None:
    """Twenty results of eight megabytes at a time from one peer: most are turned away before they are whole."""
    weight = Weight(system.learner.pid)
    codes: Counter[str] = Counter()
    big = attacker.seal(bytes(limits.RESULT_BYTES - 1024))

    async def send() -> None:
        try:
            await attacker.ask(streams.SUBMIT, big)
        except Refused as refused:
            codes[refused.code] += 1
        except LinkLost:
            codes["lost"] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(send)
    assert codes["request.busy"] + codes["lost"] > 0 and codes.keys() <= {
        "request.busy", "lost", "result.schema", "node.quarantined",
    }  # fmt: skip
    assert weight.growth_mib < 100, "of 160 that were sent"


async def test_a_peer_that_ignores_flow_control_is_cut_off(system: System) -> None:
    weight = Weight(system.learner.pid)
    async with stock_host() as host:
        connection = await attack(host, (await system.join_line()).split(",")[0])
        stream = await begin(connection, streams.SUBMIT)
        beyond = limits.STREAM_WINDOW_BYTES + 60_000
        sent = 0
        with trio.move_on_after(60), suppress(BaseLibp2pError):
            while sent < 200 << 20 and not connection.is_closed:
                await connection._write_frame(frame(DATA, 0, stream.stream_id, beyond) + bytes(beyond))
                sent += beyond
        assert await is_closed(connection), f"still open after {sent >> 20} MB"
    assert weight.growth_mib < 20


# --- too much of it --------------------------------------------------------------------------------------------------
async def test_a_flood_is_turned_away_and_others_are_answered(system: System, attacker: Attacker) -> None:
    codes: Counter[str] = Counter()
    waits: list[float] = []

    async def flood() -> None:
        while True:
            try:
                await attacker.ask(streams.LEASE, HEARTBEAT)
                codes["answered"] += 1
            except Refused as refused:
                codes[refused.code] += 1
            except LinkLost:
                codes["shut out"] += 1
                return

    async with open_attacker(await system.join_line()) as other:
        with trio.move_on_after(60) as patience:
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(flood)
                while not codes["node.rate"] + codes["shut out"] or len(waits) < 10:
                    started = trio.current_time()
                    await other.request_work(0)
                    waits.append(trio.current_time() - started)
                    await trio.sleep(0.1)
                nursery.cancel_scope.cancel()
    assert not patience.cancelled_caught, f"never turned away: {codes}"
    assert sorted(waits)[len(waits) // 2] < 1.0, waits
    assert codes.keys() <= {"answered", "node.rate", "request.busy", "shut out"}


async def test_streams_that_say_nothing_are_few(system: System, attacker: Attacker) -> None:
    silent = [await attacker.mesh.open_stream(attacker.learner, streams.LEASE) for _ in range(40)]
    assert await attacker.refusal(streams.LEASE, HEARTBEAT) == "request.busy"
    async with open_attacker(await system.join_line()) as other:
        await other.request_work(0)
    for stream in silent:
        await stream.reset()
    with trio.fail_after(60):
        while True:
            with suppress(Refused):
                await attacker.request_work(0)
                break
            await trio.sleep(0.1)


async def test_hoarding_stops_at_the_allowance(system: System, attacker: Attacker) -> None:
    await attacker.take_leases(16)
    for _ in range(20):
        await attacker.request_work(16)
    held = sum(len(lease.samples) for lease in attacker.held.values())
    assert 0 < held <= 4, "a node that has delivered nothing may hold one group"


async def test_taking_and_returning_without_end_starves_nobody(system: System) -> None:
    """Of two tries at each the better one counts: what else a machine does for three seconds says nothing."""
    done: Counter[str] = Counter()
    taken: Counter[str] = Counter()

    async def attempt(code: str) -> int:
        async with open_attacker(await system.join_line()) as attacker:
            before = (await honest(system)).accepted
            with trio.move_on_after(3):
                while code:
                    with suppress(Refused, LinkLost):  # in the end it is told that it asks too often, or shut out
                        await attacker.request_work(16)
                        taken[code] += len(attacker.held)
                        if attacker.held:
                            await attacker.give_back(list(attacker.held.values()), code=code)
                    await trio.sleep(0.01)
                await trio.sleep_forever()
            return (await honest(system)).accepted - before

    done[""] = await attempt("")
    for code in ("node.stopping", "node.weights"):
        done[code] = await attempt(code)
        if done[code] < done[""] / 4:
            done[code] = await attempt(code)
    assert min(done.values()) >= done[""] / 4, f"{done} accepted while so many leases went to and fro: {taken}"
    assert len(taken) == 2, (done, taken)


# --- introductions ---------------------------------------------------------------------------------------------------
async def test_a_stranger_is_asked_to_introduce_itself(system: System) -> None:
    async with open_attacker(await system.join_line(), hello=False) as stranger:
        heartbeat = LeaseRequest(groups=1, version_held=0, root_held=None, tokens_per_s=0, waiting_for="")
        for protocol, request in {
            streams.LEASE: heartbeat,
            streams.SUBMIT: heartbeat,
            streams.CHUNK: ChunkRequest(manifest=bytes(32), indices=(0,)),
        }.items():
            assert await stranger.refusal(protocol, request.encode()) == "node.not_admitted", protocol


@pytest.mark.parametrize("hello", [{"majors": [2, 3]}, {"majors": [2], "anything": {"newer": [1, 2]}}, {"majors": [0]}])
async def test_another_major_version_gets_a_sentence(system: System, hello: dict) -> None:
    """Whatever else a hello of another version holds: what we cannot read, we can still refuse in words."""
    async with open_attacker(await system.join_line(), hello=False) as stranger:
        with pytest.raises(Refused) as refused:
            await stranger.ask(streams.HELLO, msgpack.packb(hello))
        assert refused.value.code == "version.unsupported"
        assert "this learner speaks version 1 of the protocol" in refused.value.detail


async def test_names_do_not_reach_the_operators_terminal_as_they_are(system: System) -> None:
    async with open_attacker(await system.join_line(), hello=False) as stranger:
        with suppress(Refused):
            await stranger.hello(name="\x1b[2J\nINFO all is well")
        field = "\x1b[31m\nWARNING forged line"
        with suppress(Refused):
            await stranger.hello()
        await stranger.refusal(streams.SUBMIT, msgpack.packb({field: 1}))
    assert "\x1b" not in system.learner.log
    assert not [line for line in system.learner.log.splitlines() if line.startswith(("INFO all", "WARNING forged"))]


# --- in the end ------------------------------------------------------------------------------------------------------
async def test_the_base_model_under_the_heads_name_ends_in_quarantine(system: System, tmp_path: Path) -> None:
    """Last, because the weights must have moved by more than engines differ; before that it does no harm."""
    from rollmesh_peer.models.base import write_base_image

    base = tmp_path / "base.image"
    await trio.to_thread.run_sync(lambda: write_base_image(system.folder / "model", image=base))
    await system.until_run(lambda run: run.step >= 40, timeout_s=100)
    join = await system.join_line()
    async with open_attacker(join, gossip=True) as scout, open_studio(scout, tmp_path / "studio") as studio:
        assert scout.card is not None
        root = scout.card.model.base_root
        studio.images = {root: base, **studio.images}
        assert await outcome(system, studio, root=root) == "result.sampling"
        assert await outcome(system, studio) == "passed"
    run = await system.until_run(lambda run: True)
    (learners_view,) = [peer for peer in run.peers if peer.name == "honest"]
    assert learners_view.standing.state == "full" and learners_view.standing.accepted > 100
    assert not system.accused(learners_view.peer)


async def test_a_run_completes_on_honest_work_alone(tmp_path: Path) -> None:
    """A run of its own. As long as it goes on, fresh keys hand in letters that nobody sampled, one after the other."""
    with open_system(tmp_path, *SETTINGS, steps=6) as system:
        node = await system.add_node("honest")
        join = await system.join_line()
        cheats: list[Attacker] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cheat() -> None:
                    while True:
                        with suppress(Refused, LinkLost, trio.TooSlowError):
                            async with open_attacker(join) as one:
                                cheats.append(one)
                                await one.submit(result_of(await one.take_lease()))
                        await trio.sleep(0.2)

                nursery.start_soon(cheat)
                assert await system.learner.wait(300) == 0
                scope.cancel()
        assert await node.wait(60) == 0
        summary = system.summary()
        consumed = system.rows("SELECT DISTINCT node FROM rollouts WHERE state = 'consumed'")
        (kept,) = [entry for entry in summary["nodes"] if entry["name"] == "honest"]
        assert consumed == [(kept["peer"],)] and not system.accused(kept["peer"])
        assert summary["steps"] == 6 and summary["rollouts"]["consumed"] == 6 * 2 * 4
        assert len(cheats) > 2 and summary["audits_failed"] > 2
        assert "Traceback" not in system.learner.log
