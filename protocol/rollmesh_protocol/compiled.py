"""Loops that numba compiles at their first call, without the GIL. Modules of child processes only import this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` at its first call.

    Machine code is kept beside the byte code of its module, or in the user's cache folder; where neither can be
    written, every process compiles for itself (some seconds).
    """
    try:
        return cast(_Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast(_Function, njit(nogil=True)(function))


def inlined(function: _Function) -> _Function:
    """Compile ``function`` into the compiled loops that call it, so that they can be vectorised as a whole."""
    return cast(_Function, njit(nogil=True, inline="always")(function))
