"""Settings of the whole test suite: how hypothesis searches, and what is skipped where vLLM is not."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run and machine, and no deadline on shared cores. `deep` searches: run it by hand.
settings.register_profile("steady", derandomize=True, deadline=None, database=None, max_examples=60)
settings.register_profile(
    "deep", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# A shell that starts the suite in the background leaves SIGINT ignored, and every process a test starts inherits it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of vLLM run in the environment that has it."""
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM has an environment of its own: make test-vllm")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)
