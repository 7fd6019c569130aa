"""Settings of the whole test suite: how hypothesis searches."""

from __future__ import annotations

import os
import signal

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
