"""Scores answers that are hostile code: a zygote imports the environments once and forks for every few answers.

    scorer process ── pipes ──> zygote's parent ── fork ──> zygote (pid 1 of its namespace) ── fork ──> some answers
    (speaks to the daemon)      (waits)                     (confined; keeps the kill timer)            (confined twice)

The invariants: an answers' process ends before the next one starts, whatever it does; nothing that it does reaches
the zygote, the daemon, a file, the network, or the score of an answer in another call; of what it writes, a bounded
number of bytes is read, and only as numbers and short printable texts. A scorer that raises, hangs or dies gives 0.0
and a reason. Up to ``BATCH`` answers of one call share a process, because a fork costs 5 to 15 ms here; when that
process fails, each of them gets its own, so that none is harmed by its neighbours.

What it cannot prevent: a scorer that runs the answer as code lets the answer name its own reward, and those of the
answers it shares a process with (see ``environments.reasoning_gym.TEXT_EVALUATING``). So a call holds the answers of
one sender only. The sandbox protects the machine, not the meaning of such a reward.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, SupportsFloat

from rollmesh_peer.children import confinement, linux
from rollmesh_peer.children.child import describe
from rollmesh_peer.children.confinement import AnswerLimits, Protections
from rollmesh_peer.children.score import (
    BATCH,
    FAILED,
    NOT_A_NUMBER,
    RESULT_BYTES,
    TOO_MUCH,
    TOO_SLOW,
    Score,
    read_results,
    write_results,
)
from rollmesh_protocol.environments.interface import Environment, Item
from rollmesh_protocol.errors import ChildFailed

RESULT_DESCRIPTOR: Final = 3
"""The only descriptor of an answers' process besides three times /dev/null."""


class Sandbox:
    """The zygote's own side: fork, watch, kill, read. Lives in the confined process only.

    ``null`` is a descriptor of /dev/null and ``in_use_bytes`` the zygote's address space, both from before its
    confinement.
    """

    def __init__(self, limits: AnswerLimits, *, null: int, in_use_bytes: int, with_landlock: bool) -> None:
        self._limits = limits
        self._null = null
        self._in_use_bytes = in_use_bytes
        self._with_landlock = with_landlock

    def score(self, environment: Environment, item: Item, answers: Sequence[str]) -> list[Score]:
        """One score for each answer; returns within ``wall_s`` for each and a little, whatever the answers are."""
        scores: list[Score] = []
        for start in range(0, len(answers), BATCH):
            some = answers[start : start + BATCH]
            together, reason = self._score_together(environment, item, some)
            if together is None and len(some) > 1:
                for answer in some:
                    alone, reason = self._score_together(environment, item, [answer])
                    scores += alone or [Score(0.0, FAILED + reason)]
            else:
                scores += together or [Score(0.0, FAILED + reason)]
        return scores

    def _score_together(
        self, environment: Environment, item: Item, answers: Sequence[str]
    ) -> tuple[list[Score] | None, str]:
        """The scores of answers that share a process, or None and the reason why it has none for them."""

        def work(_layers: Protections) -> bytes:
            return write_results([_outcome(environment, item, answer) for answer in answers])

        result, reason = self._in_fork(work)
        scores = read_results(result, len(answers))
        return scores, reason or f"{len(result)} bytes instead of {len(answers)} rewards"

    def self_test(self, done: Protections) -> list[str]:
        """Let a child try to get out. Adds its layers to ``done``; returns what got through: nothing, one hopes."""

        def work(layers: Protections) -> bytes:
            return json.dumps([layers.active, layers.missing, confinement.probe(RESULT_DESCRIPTOR)]).encode()

        result, reason = self._in_fork(work)
        if not result:
            return [f"unknown: {reason}"]
        active, missing, holes = json.loads(result)
        done.active += active
        done.missing |= missing
        return [str(hole) for hole in holes]

    def _in_fork(self, work: Callable[[Protections], bytes]) -> tuple[bytes, str]:
        """What ``work`` returns in a confined child, or nothing and the reason. ``work`` is told the child's layers."""
        incoming, outgoing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(incoming)
            os.close(outgoing)
            raise ChildFailed(f"no process for an answer: {error}") from error
        if pid == 0:
            self._become_answer(work, outgoing)
        os.close(outgoing)
        try:
            return self._watch(pid, incoming)
        finally:
            os.close(incoming)

    def _watch(self, pid: int, incoming: int) -> tuple[bytes, str]:
        """Wait for the result, for the end, or for the time to run out; then end the process and all it started."""
        result, timed_out = _read(incoming, RESULT_BYTES + 1, self._limits.wall_s)
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.getpid() == 1:  # of our own process namespace: nothing of an answer survives, however it was started
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        while _reaped():
            pass
        if timed_out:
            return b"", f"{TOO_SLOW} {self._limits.wall_s:g} s"
        return result, "" if result else self._explain(os.waitstatus_to_exitcode(status))

    def _explain(self, returncode: int) -> str:
        if returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"{TOO_MUCH} {self._limits.cpu_s} s of CPU, or too much memory"
        how = f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
        return f"its process ended with {how} and no reward"

    def _become_answer(self, work: Callable[[Protections], bytes], outgoing: int) -> NoReturn:
        """The forked child: give up everything, compute, write the result, end. Never returns into the zygote."""
        status = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (0, 1, 2):
                os.dup2(self._null, number)
            os.dup2(outgoing, RESULT_DESCRIPTOR)
            linux.close_from(RESULT_DESCRIPTOR + 1)
            done = confinement.confine_answer(self._limits, self._in_use_bytes, with_landlock=self._with_landlock)
            os.write(RESULT_DESCRIPTOR, work(done))
            status = 0
        finally:
            os._exit(status)


def _outcome(environment: Environment, item: Item, answer: str) -> float | str:
    """A reward, or the text of whatever the scorer raised. A text that reads as a number is no reward."""
    try:
        reward: object = environment.reward(item, answer)
        return float(reward) if isinstance(reward, SupportsFloat) else NOT_A_NUMBER
    except BaseException as error:  # noqa: BLE001 - a bad rollout is data, not a crash
        return _words(error)


def _words(error: BaseException) -> str:
    """What an error says of itself, where saying it raises nothing."""
    try:
        return describe(error)
    except BaseException:  # noqa: BLE001 - its ``__str__`` is the answer's, too
        return "score failed: an error without words"


def _read(descriptor: int, most: int, wall_s: float) -> tuple[bytes, bool]:
    """Up to ``most`` bytes until end-of-file, and whether the time ran out first."""
    end, result = time.monotonic() + wall_s, b""
    while len(result) < most:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return result, True
        piece = os.read(descriptor, most - len(result))
        if not piece:
            break
        result += piece
    return result, False


def _reaped() -> bool:
    """Whether an orphan was there to be collected."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False
