"""Join lines: what an operator prints is what a volunteer pastes."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh_peer.mesh.join import MAX_ADDRESSES, MAX_INVITE_BYTES, JoinLine
from rollmesh_protocol.errors import UsageError
from rollmesh_protocol.identity import Identity

LEARNER = Identity(bytes(32)).peer
OTHER = Identity(b"\x01" * 32).peer
ONE = f"/ip4/203.0.113.7/tcp/4700/p2p/{LEARNER}"
TWO = f"/dns4/rl.example.org/tcp/4700/p2p/{LEARNER}"


def test_one_address():
    line = JoinLine.parse(ONE)
    assert line.learner == LEARNER
    assert line.invite is None
    assert str(line) == ONE


@pytest.mark.parametrize("between", [",", " ", ", ", "\n", " ,\t"])
def test_several_addresses_and_an_invitation(between):
    line = JoinLine.parse(between.join(["", ONE, TWO, ONE, "invite:3q2-7w", ""]))
    assert [str(address) for address in line.addresses] == [ONE, TWO]
    assert line.invite == b"\xde\xad\xbe\xef"
    assert str(line) == f"{ONE},{TWO},invite:3q2-7w"


@given(st.binary(min_size=1, max_size=80))
def test_a_printed_line_needs_no_quotes_and_comes_back(invite):
    parsed = JoinLine.parse(f"{ONE} {TWO}")
    line = JoinLine(addresses=parsed.addresses, invite=invite)
    assert shlex.split(str(line)) == [str(line)]
    assert re.fullmatch(r"[A-Za-z0-9/.:,_-]+", str(line))
    assert JoinLine.parse(str(line)) == line


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "without an address"),
        (" ,, ", "without an address"),
        ("invite:3q2-7w", "without an address"),
        ("garbage", "does not end in /p2p/"),
        (f"{ONE},/ip4/1.2.3.4/tcp/1/p2p/{OTHER}", "more than one learner"),
        (f"{ONE},invite:aa,invite:bb", "more than one invitation"),
        (f"{ONE},invite:", "damaged"),
        (f"{ONE},invite:a", "damaged"),
        (f"{ONE},invite:a=b=", "damaged"),
        (f"{ONE},invite:" + "A" * (MAX_INVITE_BYTES * 2), "oversized"),
        (",".join(f"/ip4/1.2.3.4/tcp/{n + 1}/p2p/{LEARNER}" for n in range(MAX_ADDRESSES + 1)), "addresses"),
        ("x" * 9000, "characters"),
    ],
)
def test_what_is_wrong_is_said(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        JoinLine.parse(text)


@given(st.text())
def test_no_text_does_anything_but_fail_in_words(text):
    with suppress(UsageError):
        JoinLine.parse(text)
