"""Who may join: versions, lists, invitations and address blocks, without a network."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_learner.members.admission import Registrations, check_allowlist, check_block, open_hello, open_invite
from rollmesh_protocol import codec, limits
from rollmesh_protocol.envelope import seal
from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.messages import Hello, Invite, Pass

LEARNER, STRANGER = Identity(b"L" * 32), Identity(b"S" * 32)
RUN = "run-1"
HELLO = Hello(majors=(1,), software="", name="", role="worker", engine=None, addresses=(), invite=None)
TOKEN = b"token of 16 byte"


def refusal(call, *arguments, **options) -> Refused:
    with pytest.raises(Refused) as refused:
        call(*arguments, **options)
    return refused.value


# --- versions --------------------------------------------------------------------------------------------------------
def test_a_hello_of_our_version_opens() -> None:
    assert open_hello(HELLO.encode()) == HELLO
    both = HELLO.model_copy(update={"majors": (1, 2)})
    assert open_hello(both.encode()) == both


@pytest.mark.parametrize("majors", [[2], [0], [2, 3], [-1], [1 << 60], list(range(2, 1000))])
def test_another_version_is_told_apart_from_nonsense(majors: list[int]) -> None:
    refused = refusal(open_hello, codec.pack({"majors": majors, "whatever": {"comes": ["later"]}}))
    assert refused.code == "version.unsupported"
    assert f"this learner speaks version 1 of the protocol, the node {majors[0]}" in refused.detail
    assert len(refused.detail) < limits.MAX_TEXT_CHARS


@pytest.mark.parametrize("majors", [[], [True], ["2"], [2.0], None, 2, "2", [[2]], {"2": 2}, [1]])
def test_nonsense_is_nonsense(majors: object) -> None:
    assert refusal(open_hello, codec.pack({"majors": majors})).code == "request.invalid"  # type: ignore[dict-item]


@given(st.binary(max_size=200))
def test_no_bytes_crash_it(raw: bytes) -> None:
    assert refusal(open_hello, raw).code in ("request.invalid", "request.too_large", "version.unsupported")


# --- lists and invitations -------------------------------------------------------------------------------------------
def test_a_list_names_who_may_come() -> None:
    check_allowlist("a", allowed=("a", "b"))
    refused = refusal(check_allowlist, "c", allowed=("a", "b"))
    assert refused.code == "node.allowlist"
    assert "c is not on the list" in refused.detail


def invited(envelope: bytes | None) -> Hello:
    return HELLO.model_copy(update={"invite": envelope})


def sealed(body: bytes = Invite(token=TOKEN).encode(), *, run: str = RUN, kind="invite", by=LEARNER) -> bytes:
    return seal(body, run=run, kind=kind, identity=by).encode()


def test_a_good_invitation_gives_its_token() -> None:
    assert open_invite(invited(sealed()), run=RUN, learner=LEARNER.peer) == TOKEN


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (None, "the join line has no invitation"),
        (b"", "is not good"),
        (bytes(range(100)), "is not good"),
        (sealed(by=STRANGER), "signed by a key that may not say this"),
        (sealed(run="run-2"), "belongs to another run"),
        (sealed(kind="pass"), "signed as 'pass'"),
        (sealed(Invite(token=b"x" * 16).encode()[:-1]), "is not good"),
        (sealed(Pass(peer="p", issued_version=1).encode()), "is not good"),
        (sealed()[:-1] + bytes([sealed()[-1] ^ 1]), "the signature does not match"),
    ],
)
def test_any_other_is_refused_with_one_code(envelope: bytes | None, words: str) -> None:
    refused = refusal(open_invite, invited(envelope), run=RUN, learner=LEARNER.peer)
    assert refused.code == "node.invite"
    assert words in refused.detail


# --- address blocks --------------------------------------------------------------------------------------------------
def at(host: str, *, port: int = 4000) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


@pytest.mark.parametrize(
    ("address", "others", "is_refused"),
    [
        (at("203.0.113.9"), [at("203.0.113.1"), at("203.0.113.2")], True),
        (at("203.0.113.9"), [at("203.0.113.1"), at("203.0.114.2")], False),
        (at("2001:db8:1:5::1"), [at("2001:db8:1:6::1"), at("2001:db8:1:7::1")], True),
        (at("2001:db8:1:5::1"), [at("2001:db8:1:6::1"), at("2001:db8:2:7::1")], False),
        (at("127.0.0.1"), [at("127.0.0.1")] * 1000, False),
        (at("::1"), [at("::1")] * 1000, False),
        ("", ["", "", ""], False),
        ("/dns4/example.org/tcp/1", ["/dns4/example.org/tcp/1"] * 9, False),
    ],
)
def test_a_block_holds_so_many_nodes(address: str, others: list[str], is_refused: bool) -> None:
    if not is_refused:
        check_block(address, others=others, most=2)
        return
    refused = refusal(check_block, address, others=others, most=2)
    assert refused.code == "node.too_many"


def count(registrations: Registrations, *addresses: str, now: float) -> int:
    """How many of them are let in."""
    num_in = 0
    for address in addresses:
        with suppress(Refused):
            registrations.register(address, now=now)
            num_in += 1
    return num_in


def test_new_keys_from_one_block_are_few() -> None:
    """Whoever is put into quarantine and comes again under a new key, and again, is stopped by its address."""
    registrations = Registrations(per_block=3)
    same = [at(f"203.0.113.{host}") for host in range(1, 255)]
    assert count(registrations, *same, now=0.0) == 6
    assert count(registrations, *same, now=1200.0) == 1, "three more an hour"
    assert count(registrations, *same, now=86_400.0) == 6, "and never more than twice the number of a block at once"
    assert count(registrations, at("203.0.114.1"), now=86_400.0) == 1, "other blocks are not concerned"
    assert refusal(registrations.register, same[0], now=86_400.0).code == "node.too_many"


def test_loopback_and_names_are_free() -> None:
    registrations = Registrations(per_block=1)
    assert count(registrations, *[at("127.0.0.1")] * 50, *[at("::1")] * 50, *[""] * 50, now=0.0) == 150


def test_the_blocks_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BLOCKS", 4)
    registrations = Registrations(per_block=1)
    for number in range(100):
        assert count(registrations, at(f"203.0.{number}.1"), now=0.0) == 1
    assert len(registrations._left) == 4
