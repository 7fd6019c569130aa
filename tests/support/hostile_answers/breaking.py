"""Attacks on the scoring itself: rewards that are none, errors that bite, patches for the answers that come after."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import json
import os
import random
import signal
import struct
import sys

import numpy as np

from .registry import breaks

STATE = []


@breaks
def raise_error(key):
    raise ValueError("a scorer that does not like\nthis answer \x1b[31m" + "x" * 10**6)


@breaks
def raise_exit(key):
    sys.exit(0)


@breaks
def raise_interrupt(key):
    raise KeyboardInterrupt


@breaks
def leave(key):
    os._exit(0)


@breaks
def crash(key):
    ctypes.string_at(0)


@breaks
def abort(key):
    os.abort()


@breaks
def garbage(key):
    os.write(3, b"\xff" * 7)
    os._exit(0)


@breaks
def flood(key):
    while True:
        os.write(3, b"\xff" * 4096)


@breaks
def too_much(key):
    return 2.0


@breaks
def negative(key):
    return -1.0


@breaks
def nan(key):
    return float("nan")


@breaks
def infinite(key):
    return float("inf")


@breaks
def text(key):
    return "1.0 and more"


@breaks
def poison(key):
    STATE.append("poisoned")
    _environment().reward = lambda self, item, completion: 1.0
    return 0.0


@breaks
def patch_everything(key):
    """In this process numpy, json and the built-in functions lie from now on; the next answer has another process."""
    for owner, name in ((np, "mean"), (np, "asarray"), (json, "loads"), (builtins, "float"), (struct, "pack")):
        setattr(owner, name, lambda *arguments, **named: 1.0)
    random.seed(0)
    sys.modules["json"] = sys.modules["numpy"] = None
    return 0.0


@breaks
def patch_the_sandbox(key):
    for found in gc.get_objects():
        if type(found).__name__ == "Sandbox":
            type(found).score = lambda self, environment, item, answers: [1.0] * len(answers)
            found._limits = None
    from rollmesh_peer.children import confinement, sandbox, score

    confinement.confine_answer = score.read_results = sandbox._outcome = lambda *arguments, **named: None
    return 0.0


@breaks
def patch_memory_of_an_integer(key):
    """A small integer is one object for the whole interpreter: here 1 becomes 0, and the process goes its way."""
    ctypes.memset(id(1) + 24, 0, 4)
    return 0.0


@breaks
def bite_at_exit(key):
    atexit.register(lambda: os.write(3, struct.pack("<d", 1.0)))
    for number in range(1, 32):
        with_handler(number, lambda *_: os.write(3, struct.pack("<d", 1.0)))
    return 0.0


@breaks
def bite_when_collected(key):
    class Late:
        def __del__(self):
            os.write(3, struct.pack("<d", 1.0))

    STATE.append(Late())
    raise ValueError("not yet")


@breaks
def words_that_raise(key):
    class Mute(BaseException):
        def __str__(self):
            raise SystemExit(0)

        __repr__ = __str__

    raise Mute


@breaks
def words_without_end(key):
    class Endless(Exception):
        def __str__(self):
            return "x" * (8 << 30)

    raise Endless


@breaks
def words_that_are_none(key):
    class Odd(BaseException):
        def __str__(self):
            return 7  # noqa: PLE0307 - that is the attack

    raise Odd


@breaks
def words_that_forge_a_line(key):
    """Newlines, escapes and a number's bytes in an error must not become the next answer's words or reward."""
    raise ValueError("\n\r\x1b[2J\0" + struct.pack("<d", 1.0).decode("latin-1") + "\ud800\u202e")


@breaks
def a_name_that_lies(key):
    raise type("\n1.0\x1b[31m", (BaseException,), {})


@breaks
def raise_recursion(key):
    raise RecursionError


@breaks
def raise_memory(key):
    raise MemoryError


@breaks
def raise_generator_exit(key):
    raise GeneratorExit


@breaks
def raise_group(key):
    raise BaseExceptionGroup("many", [SystemExit(0), KeyboardInterrupt()])


@breaks
def a_text(key):
    return "1.0"


@breaks
def some_bytes(key):
    return b"1.0"


@breaks
def huge(key):
    return 10**400


@breaks
def imaginary(key):
    return 1j


@breaks
def nothing(key):
    return None


@breaks
def an_array(key):
    return np.ones(2)


@breaks
def a_liar(key):
    """A float that says of itself that it lies between 0 and 1."""

    class Liar(float):
        def __le__(self, other):
            return True

        __ge__ = __lt__ = __gt__ = __eq__ = __le__
        __hash__ = float.__hash__

    return Liar(7.0)


@breaks
def a_number_that_raises(key):
    class Trap:
        def __float__(self):
            raise KeyboardInterrupt

    return Trap()


@breaks
def a_number_that_is_none(key):
    class Trap:
        def __float__(self):
            return "1.0"

    return Trap()


@breaks
def too_many_rewards(key):
    os.write(3, struct.pack("<d", 1.0) * 4096)
    os._exit(0)


@breaks
def half_a_reward(key):
    os.write(3, struct.pack("<d", 1.0)[:5])
    os._exit(0)


@breaks
def signalling_nan(key):
    os.write(3, b"\x01\0\0\0\0\0\xf4\x7f")
    os._exit(0)


def with_handler(number, handler):
    try:
        signal.signal(number, handler)
    except (OSError, ValueError):
        return


def _environment():
    return sys.modules[__package__].Hostile
