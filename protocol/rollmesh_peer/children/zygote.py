"""The process that imports the environments, locks itself up, and forks for answers (see ``sandbox``).

It is forked off while the scorer has one thread, because a process with threads can leave no namespace. Of the
scorer's descriptors it keeps stderr and its own two pipes, so that the daemon sees end-of-file when the scorer dies;
when the scorer goes, its pipe ends and it ends. It imports environments before it is confined: that code is the
operator's choice, the answers are not.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import time
from collections.abc import Iterator
from typing import Final, NoReturn

from rollmesh_peer.children import confinement, frames, linux
from rollmesh_peer.children.child import Pipes, Verb, describe, perform
from rollmesh_peer.children.confinement import AnswerLimits, Protections
from rollmesh_peer.children.frames import Body
from rollmesh_peer.children.plugins import load_environment
from rollmesh_peer.children.sandbox import Sandbox
from rollmesh_peer.children.score import ERROR_CHARS, Score
from rollmesh_protocol.environments.interface import Environment, Item
from rollmesh_protocol.errors import ChildFailed, RollmeshError

ZYGOTE_STATUS: Final = 4
"""Exit status of a scorer whose zygote is gone."""


class Zygote:
    """The scorer's handle of the confined process; made before the scorer has a second thread."""

    def __init__(self) -> None:
        from_us, to_zygote = os.pipe()
        from_zygote, to_us = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _be_zygote(from_us, to_us)
            finally:
                os._exit(ZYGOTE_STATUS)
        os.close(from_us)
        os.close(to_us)
        self._pipes = Pipes(os.fdopen(from_zygote, "rb"), to_zygote)

    def call(self, verb: str, body: Body) -> Body:
        """The zygote's answer. Without a zygote there is no scorer: the process ends, and is started again."""
        answer = None
        with contextlib.suppress(BrokenPipeError):
            self._pipes.send(frames.pack(frames.CALL, 0, {"verb": verb, "body": body}))
            answer = self._pipes.receive()
        if answer is None:
            os.write(2, b"the sandbox is gone\n")
            os._exit(ZYGOTE_STATUS)
        if answer["kind"] == frames.ERROR:
            raise RollmeshError(str(answer.get("detail")), code=str(answer.get("code")))
        return frames.body_of(answer)


def _be_zygote(incoming: int, outgoing: int) -> NoReturn:
    """The forked process, before and after its confinement; ends when the scorer has gone."""
    incoming, outgoing = (fcntl.fcntl(number, fcntl.F_DUPFD, 8) for number in (incoming, outgoing))
    os.dup2(incoming, 3)
    os.dup2(outgoing, 4)
    linux.close_from(5)  # the daemon's pipes, too: it must see end-of-file when the scorer dies
    protections = confinement.enter_namespaces()
    pid = os.fork()
    if pid != 0:
        linux.close_from(3)
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
        self._environments: list[Environment] = []
        self._sandbox: Sandbox | None = None

    def open(self, body: Body) -> Body:
        """Import the environments, then give up everything.

        {environments: [{name, parameters}], seed, hidden: [folder], cpu_s, wall_s, memory_bytes}
        -> {active: [layer], missing: {layer: reason}, holes: [what got through in a test]}
        """
        if self._environments:
            raise ChildFailed("this scorer is open already")
        choices, seed, hidden = body.get("environments"), body.get("seed"), body.get("hidden")
        if not isinstance(choices, list) or not isinstance(seed, int) or not isinstance(hidden, list):
            raise ChildFailed("open needs environments, a seed and hidden folders")
        limits = AnswerLimits.from_plain(body)
        self._environments = [load_environment(one["name"], one["parameters"], seed=seed) for one in choices]
        null = os.open(os.devnull, os.O_RDWR)
        gc.collect()
        gc.freeze()  # so that a child's collector does not touch, and so copy, every page
        os.environ.clear()
        in_use_bytes = confinement.memory_in_use_bytes()
        done = self._protections
        confinement.confine_zygote(done, [str(folder) for folder in hidden])
        with_landlock = "landlock" in done.active
        self._sandbox = Sandbox(limits, null=null, in_use_bytes=in_use_bytes, with_landlock=with_landlock)
        holes = self._sandbox.self_test(done)
        return {"active": done.active, "missing": done.missing, "holes": holes}

    def score(self, body: Body) -> Body:
        """{environment: number, item, answers: [str]} -> {rewards: [float], errors: [str | None], seconds}"""
        sandbox = self._sandbox
        if sandbox is None:
            raise ChildFailed("this scorer has not been opened")
        number, answers = body.get("environment"), body.get("answers")
        if not isinstance(number, int) or not 0 <= number < len(self._environments) or not isinstance(answers, list):
            raise ChildFailed("score needs the number of an environment, an item and answers")
        environment, item = self._environments[number], Item.from_plain(body.get("item"))
        start = time.perf_counter()
        reason = _warm(environment, item)
        if reason:
            scores = [Score(0.0, reason)] * len(answers)
        else:
            scores = sandbox.score(environment, item, [str(answer) for answer in answers])
        seconds = time.perf_counter() - start
        return {"rewards": [s.reward for s in scores], "errors": [s.error for s in scores], "seconds": seconds}


def _warm(environment: Environment, item: Item) -> str:
    """Let the environment prepare the item; why it cannot, in short. A ``RollmeshError`` goes on to the daemon."""
    warm = getattr(environment, "warm", None)
    try:
        if warm is not None:
            warm(item)
    except RollmeshError:
        raise
    except Exception as error:  # noqa: BLE001 - a bad item is data, not a crash
        return f"score failed: the item cannot be prepared: {describe(error)}"[:ERROR_CHARS]
    return ""


def _no_stream(_call_id: int, _items: Iterator[Body]) -> None:
    raise ChildFailed("a zygote streams nothing")
