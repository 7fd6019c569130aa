"""What every test of vLLM asks first."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

MISSING = find_spec("vllm") is None
WHY = "vLLM is not in this environment; `make test-vllm` sets one up and runs this"
NEEDS_VLLM = pytest.mark.skipif(MISSING, reason=WHY)


def skip_without_vllm() -> None:
    """Skip a whole module before it imports vllm."""
    if MISSING:
        pytest.skip(WHY, allow_module_level=True)
