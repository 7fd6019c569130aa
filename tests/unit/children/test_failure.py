"""The sentences that a dead child leaves, and the errors that come through its pipe."""

from __future__ import annotations

import pytest

from rollmesh_peer.children.failure import DIED, QUOTED_CHARS, describe_exit, error_of, quote
from rollmesh_protocol.errors import ChildFailed, HostError, LinkLost, Refused, RollmeshError, UsageError


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (None, "is not reachable"),
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (-9, "was killed (out of memory?)"),
        (-15, "was ended by signal 15 (SIGTERM: terminated)"),
        (-11, "crashed by signal 11 (SIGSEGV: segmentation fault)"),
        (-6, "crashed by signal 6 (SIGABRT: aborted)"),
        (-99, "was ended by signal 99"),
    ],
)
def test_exit_in_words(returncode: int | None, words: str) -> None:
    code, how = describe_exit(returncode)
    assert code == DIED
    assert how.startswith(words)


def test_last_words_are_the_last_and_few() -> None:
    assert quote([]) == ""
    assert quote(["a", " b ", "c", "d"]) == "; its last words: b | c | d"
    assert len(quote(["x" * 5000])) <= QUOTED_CHARS + 20


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("lease.expired", Refused),
        ("usage", UsageError),
        ("host", HostError),
        ("link.lost", LinkLost),
        ("child.failed", ChildFailed),
        ("something.new", ChildFailed),
    ],
)
def test_errors_come_back_as_what_they_were(code: str, kind: type[RollmeshError]) -> None:
    error = error_of("engine", {"kind": "error", "id": 1, "code": code, "detail": "why"})
    assert type(error) is kind
    assert error.code == code
    assert "why" in error.detail
