"""Attacks that do not end, or grow until something else does."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import sys
import threading

from .registry import hangs


@hangs
def loop(key):
    while True:
        pass


@hangs
def loop_ignoring_signals(key):
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        pass


@hangs
def wait_for_ever(key):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@hangs
def sleep(key):
    import select

    select.select([], [], [], 600)


@hangs
def allocate(key):
    block = bytearray(8 << 30)
    block[::4096] = b"x" * len(block[::4096])
    return 1.0


@hangs
def allocate_slowly(key):
    kept = []
    while True:
        kept.append(bytearray(1 << 20))


@hangs
def recurse(key):
    return recurse(key)


@hangs
def print_endlessly(key):
    for _ in range(10**6):
        print("x" * 1000)
    return 0.0


@hangs
def map_memory(key):
    kept = []
    while True:
        kept.append(mmap.mmap(-1, 64 << 20))
        kept[-1][:: 1 << 12] = b"x" * len(kept[-1][:: 1 << 12])


@hangs
def map_a_tebibyte(key):
    mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    return 1.0


@hangs
def recurse_through_the_stack(key):
    """Beyond Python's own guard, into the end of the C stack."""
    sys.setrecursionlimit(10**9)
    value = []
    for _ in range(10**6):
        value = [value]
    return len(repr(value))


@hangs
def backtrack(key):
    """One call that never comes back to the interpreter, so that no Python signal handler could end it."""
    return 1.0 if re.match(r"(a+)+$", "a" * 64 + "!") else 0.0


@hangs
def count_in_c(key):
    return 0.0 * sum(range(10**15))


@hangs
def power(key):
    return 0.0 if 9**9**9**9 else 1.0


@hangs
def catch_everything(key):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass


@hangs
def close_its_pipe_and_stay(key):
    """End-of-file before any reward: the process is ended, not waited for."""
    os.close(3)
    while True:
        pass
