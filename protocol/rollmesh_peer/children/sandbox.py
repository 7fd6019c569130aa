"""Scores answers that are hostile code: a zygote imports the environments once and forks for every answer.

    scorer process ── pipes ──> zygote's parent ── fork ──> zygote (pid 1 of its namespace) ── fork ──> one answer
    (speaks to the daemon)      (waits)                     (confined; keeps the kill timer)            (confined twice)

The invariants: an answer's process ends before the next one starts, whatever it does; nothing that it does reaches
another answer's score, the zygote, the daemon, a file or the network; of what it writes, at most ``RESULT_BYTES``
are read, and only as a number and a short printable text. A scorer that raises, hangs or dies gives 0.0 and a reason.

What it cannot prevent: a scorer that runs the answer as code lets the answer name its own reward (see
``environments.reasoning_gym.TEXT_EVALUATING``). The sandbox protects the machine, not the meaning of such a reward.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from rollmesh_peer.children import confinement, frames, linux
from rollmesh_peer.children.child import Pipes, Verb, describe, leave, perform
from rollmesh_peer.children.confinement import AnswerLimits, Protections
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.plugins import load_environment
from rollmesh_protocol.environments.interface import Environment, Item
from rollmesh_protocol.errors import ChildFailed, HostError, LinkLost, RollmeshError

REWARD: Final = struct.Struct("<d")
ERROR_CHARS: Final = 200
"""Of a scorer's exception, type and message: enough to recognise it, too little to fill a log."""
RESULT_BYTES: Final = REWARD.size + 4 * ERROR_CHARS
"""Most that is read of an answer's process; below ``PIPE_BUF``, so it is written at once or not at all."""
RESULT_DESCRIPTOR: Final = 3
"""The only descriptor of an answer's process besides three times /dev/null."""
ZYGOTE_STATUS: Final = 4
"""Exit status of a scorer whose zygote is gone."""


@dataclass(frozen=True)
class Score:
    """The reward of one answer in [0, 1], and why it is 0 when scoring failed."""

    reward: float
    error: str | None = None


def read_result(result: bytes) -> Score:
    """A score from what an answer's process wrote: 8 bytes of float64, then the text of an error. Pure."""
    if not REWARD.size <= len(result) <= RESULT_BYTES:
        return Score(0.0, f"score failed: {len(result)} bytes instead of a reward")
    (reward,) = REWARD.unpack(result[: REWARD.size])
    text = result[REWARD.size :].decode("utf-8", "replace")
    if text:
        return Score(0.0, "".join(c if c.isprintable() else " " for c in text)[:ERROR_CHARS])
    if not 0.0 <= reward <= 1.0:  # false for NaN, too
        return Score(0.0, f"score failed: the reward {reward:g} is not in [0, 1]")
    return Score(reward)


class Sandbox:
    """The zygote's own side: fork, watch, kill, read. Lives in the confined process only."""

    def __init__(self, environments: Sequence[Environment], limits: AnswerLimits, *, with_landlock: bool) -> None:
        self._environments = environments
        self._limits = limits
        self._with_landlock = with_landlock
        self._in_use_bytes = confinement.memory_in_use_bytes()
        self._null = os.open(os.devnull, os.O_RDWR)

    def score(self, environment: Environment, item: Item, answer: str) -> Score:
        """The score of one answer; returns within the limits' ``wall_s`` and a little, whatever the answer is."""
        return self._in_fork(lambda: environment.reward(item, answer))

    def last_layers(self) -> Protections:
        """What :func:`confinement.confine_answer` achieves, as told by a child that tried."""
        done = Protections()
        for bit, name in enumerate(("limits", "seccomp")):
            outcome = self._in_fork(lambda: 0.0, report=bit)
            if outcome.error is None:
                done.active.append(name)
            else:
                done.missing[name] = outcome.error
        return done

    def holes(self) -> list[str]:
        """Which of :data:`confinement.PROBES` get through; an empty list is what it is all for."""
        outcome = self._in_fork(lambda: confinement.probe(RESULT_DESCRIPTOR) / 2 ** len(confinement.PROBES))
        if outcome.error is not None:
            return [f"unknown: {outcome.error}"]
        worked = round(outcome.reward * 2 ** len(confinement.PROBES))
        return [name for bit, name in enumerate(confinement.PROBES) if worked >> bit & 1]

    def _in_fork(self, action: Callable[[], float], *, report: int | None = None) -> Score:
        """Run ``action`` in a confined child; with ``report``, whether that layer of the confinement is missing."""
        incoming, outgoing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(incoming)
            os.close(outgoing)
            raise HostError(f"no process for an answer: {error}") from error
        if pid == 0:
            self._become_answer(action, outgoing, report)
        os.close(outgoing)
        try:
            return self._watch(pid, incoming)
        finally:
            os.close(incoming)

    def _watch(self, pid: int, incoming: int) -> Score:
        """Wait for the result, for the end, or for the time to run out; then end the process and all it started."""
        ready, _, _ = select.select([incoming], [], [], self._limits.wall_s)
        result = os.read(incoming, RESULT_BYTES + 1) if ready else b""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.getpid() == 1:  # of our own process namespace: nothing of an answer survives, however it was started
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        while _reaped():
            pass
        if result:
            return read_result(result)
        return Score(0.0, self._explain(status, timed_out=not ready))

    def _explain(self, status: int, *, timed_out: bool) -> str:
        if timed_out:
            return f"score failed: no reward within {self._limits.wall_s:g} s"
        code = os.waitstatus_to_exitcode(status)
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"score failed: more than {self._limits.cpu_s} s of CPU, or too much memory"
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return f"score failed: the process ended with {how} and no reward"

    def _become_answer(self, action: Callable[[], float], outgoing: int, report: int | None) -> NoReturn:
        """The forked child: give up everything, compute, write the result, end. Never returns into the zygote."""
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            # First out of the way of the descriptors that are overwritten.
            result = os.dup(outgoing) if outgoing <= RESULT_DESCRIPTOR else outgoing
            for number in (0, 1, 2):
                os.dup2(self._null, number)
            os.dup2(result, RESULT_DESCRIPTOR)
            linux.close_from(RESULT_DESCRIPTOR + 1)
            done = confinement.confine_answer(self._limits, self._in_use_bytes, with_landlock=self._with_landlock)
            if report is not None:
                name = ("limits", "seccomp")[report]
                os.write(RESULT_DESCRIPTOR, REWARD.pack(0.0) + done.missing.get(name, "").encode())
            else:
                os.write(RESULT_DESCRIPTOR, _outcome(action))
        finally:
            os._exit(0)


def _outcome(action: Callable[[], float]) -> bytes:
    try:
        return REWARD.pack(float(action()))
    except BaseException as error:  # noqa: BLE001 - a bad rollout is data, not a crash
        return REWARD.pack(0.0) + describe(error)[:ERROR_CHARS].encode("utf-8", "replace")[: 4 * ERROR_CHARS]


def _reaped() -> bool:
    """Whether an orphan was there to be collected."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


class Zygote:
    """The scorer's handle of the confined process; started before the scorer has a second thread."""

    def __init__(self) -> None:
        from_us, to_zygote = os.pipe()
        from_zygote, to_us = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _be_zygote(from_us, to_us)
            except BaseException:
                import traceback

                traceback.print_exc()
                raise
            finally:
                os._exit(ZYGOTE_STATUS)
        os.close(from_us)
        os.close(to_us)
        self._pipes = Pipes(os.fdopen(from_zygote, "rb"), to_zygote)

    def call(self, verb: str, body: Body) -> Body:
        """The zygote's answer. Without a zygote there is no scorer: the process ends, and is started again."""
        self._pipes.send(frames.pack(frames.CALL, 0, {"verb": verb, "body": body}))
        answer = self._pipes.receive()
        if answer is None:
            print("the sandbox is gone", file=sys.stderr, flush=True)
            leave(ZYGOTE_STATUS)
        if answer["kind"] == frames.ERROR:
            raise RollmeshError(str(answer.get("detail")), code=str(answer.get("code")))
        return frames.body_of(answer)


def _be_zygote(incoming: int, outgoing: int) -> None:
    """The forked process before and after its confinement; returns when the scorer has gone."""
    # The daemon's pipes must not stay open here: keep our two, after the three standard ones.
    incoming, outgoing = os.dup(incoming), os.dup(outgoing)
    high = [os.dup2(number, place) for number, place in ((incoming, 1000), (outgoing, 1001))]
    os.dup2(high[0], 3)
    os.dup2(high[1], 4)
    linux.close_from(5)
    protections = confinement.enter_namespaces()
    pid = os.fork()
    if pid != 0:
        os.close(3)
        os.close(4)
        _, status = os.waitpid(pid, 0)
        os._exit(ZYGOTE_STATUS if status else 0)
    desk = _ZygoteDesk(protections)
    verbs: dict[str, Verb] = {"open": desk.open, "score": desk.score}
    pipes = Pipes(os.fdopen(3, "rb"), 4)
    while (frame := pipes.receive()) is not None:
        pipes.send(perform(verbs, frame, _no_stream))
    os._exit(0)


class _ZygoteDesk:
    """The two things that a zygote does: open once, then score."""

    def __init__(self, protections: Protections) -> None:
        self._protections = protections
        self._sandbox: Sandbox | None = None
        self._environments: list[Environment] = []

    def open(self, body: Body) -> Body:
        """Import the environments, then give up everything. {environments, seed, hidden, cpu_s, wall_s, memory_bytes}"""
        if self._sandbox is not None:
            raise ChildFailed("this scorer is open already")
        choices, seed, hidden = body["environments"], body["seed"], body["hidden"]
        if not isinstance(choices, list) or not isinstance(seed, int) or not isinstance(hidden, list):
            raise ChildFailed("open needs environments, a seed and hidden folders")
        self._environments = [load_environment(one["name"], one["parameters"], seed=seed) for one in choices]
        limits = AnswerLimits(
            cpu_s=int(str(body["cpu_s"])), wall_s=float(str(body["wall_s"])), memory_bytes=int(str(body["memory_bytes"]))
        )
        done = self._protections
        sandbox = None
        gc.collect()
        gc.freeze()  # so that a child's collector does not touch, and so copy, every page
        os.environ.clear()
        sandbox = Sandbox(self._environments, limits, with_landlock=False)
        confinement.confine_zygote(done, [str(path) for path in hidden])
        sandbox = self._sandbox = sandbox.with_landlock("landlock" in done.active)
        last = sandbox.last_layers()
        done.active += last.active
        done.missing |= last.missing
        return {"active": list(done.active), "missing": dict(done.missing), "holes": sandbox.holes()}

    def score(self, body: Body) -> Body:
        """{environment: index, item, answers: [str]} -> {rewards, errors, seconds}"""
        if self._sandbox is None:
            raise ChildFailed("this scorer has not been opened")
        index, answers = body["environment"], body["answers"]
        if not isinstance(index, int) or not 0 <= index < len(self._environments) or not isinstance(answers, list):
            raise ChildFailed("score needs the number of an environment, an item and answers")
        environment, item = self._environments[index], Item.from_plain(body["item"])
        warm = getattr(environment, "warm", None)
        if warm is not None:
            warm(item)
        start = time.perf_counter()
        scores = [self._sandbox.score(environment, item, str(answer)) for answer in answers]
        seconds = time.perf_counter() - start
        return {"rewards": [s.reward for s in scores], "errors": [s.error for s in scores], "seconds": seconds}


def _no_stream(_call_id: int, _items: Iterator[Body]) -> None:
    raise LinkLost("a zygote streams nothing")
