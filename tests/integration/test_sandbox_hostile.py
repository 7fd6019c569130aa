"""Answers that attack the scorer, through the real pipe: each gets nowhere, and the next honest answer is scored right.

The environment of ``tests/support/hostile_answers`` runs the answer it is given, as the worst scorer would. Every
attack returns 1.0 where it got what it wanted, so a reward of 0.0 shows that it did not; the same attacks run without
a sandbox show that they work. All of it runs as the user of this test and, where that is root, once more as nobody and
as root of a container.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh_peer.children.score import Score
from tests.support.hostile_answers import ATTACKS
from tests.support.sandbox_stage import SECRET, USERS, Stage, staged

ENDS_BY_ITSELF = frozenset({"print_endlessly"})
"""It fills a pipe that nobody reads, were it not for /dev/null."""


READS = frozenset(
    {"read_ledger", "read_ledger_beside_code", "read_key", "read_passwd", "read_file_of_another_user",
     "list_run_folder", "list_homes", "read_proc", "read_proc_of_any_process", "open_descriptors_by_name"}
)  # fmt: skip
"""What only an empty root or Landlock refuses; another user hides what is not open to everybody."""


def not_held_here(attack: str, active: set[str]) -> str:
    """Why this machine cannot be expected to refuse an attack; empty where it must."""
    if attack in READS and not active & {"empty root", "landlock"}:
        return "a kernel without Landlock and namespaces: an answer that runs as code reads what this user can read"
    if ATTACKS[attack].kind == "reach" and "seccomp" not in active:
        return "a kernel or machine without seccomp: an answer that runs as code can try every system call"
    return ""


@pytest.fixture(scope="module", params=USERS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with staged(str(request.param)) as built:
        yield built


@pytest.fixture(scope="module")
def outcome(stage: Stage) -> dict[str, list[object]]:
    """Every attack and an honest answer after it, by a daemon of its own; also proof that the daemon survives."""
    # Code and ledger in one folder, as in a careless set-up: "hidden" must keep the folder from being readable.
    hidden = [str(stage.key["run"]), str(stage.key["beside"])]
    done = stage.run("daemon.py", *(json.dumps(part) for part in (stage.key, list(ATTACKS), hidden)), timeout_s=170)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(180)
def test_confinement_is_complete_on_this_kernel(outcome: dict[str, list[object]], stage: Stage) -> None:
    active, missing, holes, gaps = outcome["confinement"]
    assert isinstance(active, list) and isinstance(missing, dict)
    print(f"\nas {stage.user}: {active}, missing {missing}")
    assert holes == []
    assert {"limits", "seccomp"} <= set(active) or os.uname().machine not in ("x86_64", "aarch64")
    if stage.user == "own" and os.geteuid() == 0:
        assert "other user" in active
    if stage.user == "container":
        assert "namespaces" not in active
        assert any("seccomp alone" in str(gap) for gap in gaps)  # type: ignore[attr-defined]
    if not missing:
        assert gaps == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_gets_nowhere(outcome: dict[str, list[object]], attack: str) -> None:
    tried = ATTACKS[attack]
    if unheld := not_held_here(attack, set(outcome["confinement"][0])):  # type: ignore[call-overload]
        pytest.skip(unheld)
    reward, error, after, after_error, took = outcome[attack]
    assert reward == 0.0, error
    assert (after, after_error) == (0.75, None)
    if tried.kind == "reach" and tried.is_told:
        # Refused by the kernel, and told so: a process that merely ended would show nothing.
        assert str(error).startswith(
            (
                "PermissionError",
                "FileNotFoundError",
                "ProcessLookupError",
                "OSError",
                "RuntimeError",
                "gaierror",
                "itimer_error",
                "ValueError: not allowed to raise",
            )
        )
    assert isinstance(took, float) and took < 6.0
    if tried.kind == "hang" and attack not in ENDS_BY_ITSELF:
        assert error


@pytest.mark.timeout(180)
def test_nothing_was_left_behind(outcome: dict[str, list[object]], stage: Stage) -> None:
    assert outcome["alive"]
    for name in ("ledger", "beside"):
        path = Path(str(stage.key[name]))
        assert path.read_text() == SECRET
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not (Path(str(stage.key["run"])) / "written").exists()
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/", str(stage.folder / "code")):
        assert not (Path(folder) / "rollmesh-hostile").exists()


@pytest.mark.timeout(180)
def test_errors_are_short_printable_words(outcome: dict[str, list[object]]) -> None:
    errors = [str(outcome[name][1]) for name in ATTACKS]
    assert all(len(error) <= 220 and error.isprintable() for error in errors)
    assert str(outcome["raise_error"][1]).startswith("ValueError: a scorer that does not like this answer")
    assert "0.0" not in str(outcome["nan"][1]) and "not a number" in str(outcome["nan"][1])
    assert "not in [0, 1]" in str(outcome["too_much"][1])
    assert "CPU" in str(outcome["loop"][1]) or "no reward within" in str(outcome["loop"][1])  # on a busy machine
    assert "no reward within" in str(outcome["wait_for_ever"][1])
    assert "MemoryError" in str(outcome["allocate"][1])
    over_limits = [name for name, error in zip(ATTACKS, errors, strict=True) if Score(0.0, error).is_over_limits]
    assert {"loop", "wait_for_ever", "allocate"} <= set(over_limits) and "raise_error" not in over_limits


@pytest.mark.timeout(180)
def test_honest_answers_are_not_harmed_by_neighbours_of_one_batch(outcome: dict[str, list[object]]) -> None:
    mixed = outcome["mixed"]
    assert [entry[0] for entry in mixed] == [0.75, 0.0, 0.0, 0.0, 0.75, 0.0]  # type: ignore[index]
    assert [entry[1] is None for entry in mixed] == [True, False, True, False, True, False]  # type: ignore[index]
    assert outcome["many"] == [0.75, 0.0] * 50


@pytest.mark.parametrize("attack", [name for name, attack in ATTACKS.items() if attack.works_outside])
def test_attack_works_without_a_sandbox(stage: Stage, attack: str) -> None:
    """The control: an attack that fails for a reason of its own would show nothing above."""
    done = stage.run("control.py", json.dumps(stage.key), attack, timeout_s=60)
    assert done.stdout.strip() == "1.0", done.stderr
    for name in ("ledger", "beside"):
        Path(str(stage.key[name])).write_text(SECRET)
    (Path(str(stage.key["run"])) / "written").unlink(missing_ok=True)
