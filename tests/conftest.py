"""The plugins of all tests, and the settings of Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# gRPC must not be imported before this. Its fork handlers disturb PySpark between its fork and the
# start of Java: Spark sometimes did not start after a test had used gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its core reports the end of each connection that a test ends as information.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import structlog
from hypothesis import HealthCheck, core, settings

from tests.support.seeds import EXAMPLES, current_seed, forget_current_seed, seed_base

# The default writes each traceback with all variables, which takes a second.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

pytest_plugins = ["tests.quiet_runs", "tests.schedule"]

# The time of one example depends on the load of the machine, so it has no deadline. Examples follow
# from the seed base, as all other chance of the tests does.
settings.register_profile(
    "tidemill",
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=EXAMPLES,
)
settings.load_profile("tidemill")
core.global_force_seed = seed_base()  # type: ignore[assignment]  # Declared by its default, None.


def pytest_report_header() -> str:
    return f"first seed: {seed_base()}, examples: {EXAMPLES}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the command that repeats a failure to its report."""
    report = yield
    if call.when == "call":
        if report.failed:
            report.sections.append(("repeat this failure", replay_command(item)))
        forget_current_seed()
    return report


def replay_command(item: pytest.Item) -> str:
    """Return the command that runs the test with the same seed."""
    parameters = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    seed = parameters.get("seed", current_seed())
    if isinstance(seed, int):
        return f"TIDEMILL_TEST_SEEDS={seed} make test ARGS='{item.nodeid.partition('[')[0]}'"
    return f"TIDEMILL_TEST_SEED_BASE={seed_base()} make test ARGS='{item.nodeid}'"
