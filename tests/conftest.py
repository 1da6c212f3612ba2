"""What all tests share: the patience of Hypothesis, and how many examples it tries."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before anybody imports gRPC, whose handlers of forks break what PySpark does between its fork and
# the start of Java: now and then Spark did not start where a test had used gRPC before.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How long an example takes says how busy the machine is. What else Hypothesis chooses for CI, the
# same examples in every run among it, stays.
own = settings.get_profile(settings.get_current_profile_name())
settings.register_profile(
    "tidemill",
    own,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("TIDEMILL_TEST_EXAMPLES", str(own.max_examples))),
)
settings.load_profile("tidemill")
