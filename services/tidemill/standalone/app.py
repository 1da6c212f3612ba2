"""The supervisor: starts the processes, prints their addresses and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Final

import structlog

from tidemill.common.lifecycle import StartError, stop_on_signal
from tidemill.common.log import configure_logging
from tidemill.common.parent import die_with_parent
from tidemill.standalone.broker_stores import CONTROLLER, brokers_of
from tidemill.standalone.child import Child, ChildFailure
from tidemill.standalone.child_plan import planned_children
from tidemill.standalone.command_lines import MIN_IN_SYNC
from tidemill.standalone.forks import RunToEnd, import_shared
from tidemill.standalone.key_file import ensure_key_file
from tidemill.standalone.settings import StandaloneSettings

log = structlog.get_logger()

PATIENCE_S: Final = 30.0  # with the first start of brokers


def main(arguments: Sequence[str], run_to_end: RunToEnd) -> int:
    """Run all processes until SIGTERM; return the exit status. Forks call `run_to_end`."""
    settings = StandaloneSettings.load(arguments)
    configure_logging(
        process="standalone", level=settings.log_level, log_format=settings.log_format
    )
    if settings.supervisor_fd is not None:
        die_with_parent()
    import_shared()
    try:
        return asyncio.run(serve(settings, run_to_end))
    except StartError as refusal:
        log.error("process refused to start", reason=str(refusal))  # noqa: TRY400  # The reason is complete.
        return 1


async def serve(settings: StandaloneSettings, run_to_end: RunToEnd) -> int:
    """Run the children until the first signal; stop clients first and the stores last."""
    if settings.replicas == MIN_IN_SYNC:
        log.warning(
            "two replicas tolerate no failure; use three to tolerate one",
            replicas=settings.replicas,
            min_in_sync=MIN_IN_SYNC,
        )
    ensure_key_file(settings)
    with planned_children(settings, run_to_end) as children:
        stages = stages_of(children, settings)

        def kill_all() -> None:
            for child in children:
                child.kill()

        def reload_all() -> None:
            for child in children:
                child.reload()

        with stop_on_signal(
            supervisor_fd=settings.supervisor_fd, before_exit=kill_all, on_hangup=reload_all
        ) as stop:
            runs = {
                child: asyncio.create_task(
                    run_after(needed_by(child, children, settings), child), name=child.name
                )
                for child in children
            }
            status = await supervise(children, list(runs.values()), stop)
            log.info("standalone stopping")
            for stage in stages:
                await stop_children(stage, runs, settings.stop_timeout_ms)
    return status


async def run_after(
    needed: Sequence[Child], child: Child, *, patience_s: float = PATIENCE_S
) -> None:
    """Run a child, which serves once the children that it needs serve, or after `patience_s`.

    The other replicas of a broker group serve while one of them reads a long log.
    """

    async def let_serve() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(all_ready(needed), patience_s)
        child.may_serve.set()

    waiting = asyncio.create_task(let_serve(), name=f"{child.name} waits")
    try:
        await child.run()
    finally:
        waiting.cancel()


async def supervise(
    children: Sequence[Child], runs: Sequence[asyncio.Task[None]], stop: asyncio.Event
) -> int:
    """Print the ready line when all children serve; return if stopped or if a start fails."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    ready = asyncio.create_task(all_ready(children), name="ready")
    pending: set[asyncio.Task[None] | asyncio.Task[bool]] = {*runs, ready, stopped}
    try:
        while not stop.is_set():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for run in runs:
                if run in done and (failure := run.exception()) is not None:
                    log.error("process did not start", reason=str(failure))
                    return failure.status if isinstance(failure, ChildFailure) else 1
            if ready in done:
                print_ready(children)
    finally:
        stopped.cancel()
        ready.cancel()
    return 0


async def all_ready(children: Sequence[Child]) -> None:
    """Wait until every child has announced itself."""
    for child in children:
        await child.is_ready.wait()


async def stop_children(
    children: Sequence[Child], runs: dict[Child, asyncio.Task[None]], timeout_ms: int
) -> None:
    """Stop `children` together; kill those that take longer than `timeout_ms`."""
    for child in children:
        child.stop()
        if child.pid == 0:
            runs[child].cancel()  # It waits for its start or restart.
    tasks = [runs[child] for child in children]
    _, late = await asyncio.wait(tasks, timeout=timeout_ms / 1000)
    if late:
        log.warning(
            "killing children that did not stop in time", children=[t.get_name() for t in late]
        )
        for child in children:
            child.kill()
        await asyncio.wait(tasks)


def print_ready(children: Sequence[Child]) -> None:
    """Print the addresses as the only line on standard output."""
    by_name = {child.name: child for child in children}
    line = {
        "event": "ready",
        "grpc": by_name["proxy-0"].addresses["grpc"],
        "admin": by_name["admin"].addresses["admin"],
        "processes": {
            child.name: {"pid": child.serving_pid, "metrics": child.addresses["metrics"]}
            for child in children
        },
    }
    for optional in ("adminGrpc", "scaler"):
        if optional in by_name["admin"].addresses:
            line[optional] = by_name["admin"].addresses[optional]
    try:
        # Not buffered. A buffered line that cannot be written would fail again at the exit.
        os.write(sys.stdout.fileno(), (json.dumps(line) + "\n").encode())
    except OSError as error:
        log.warning("ready line not written", reason=str(error))
    log.info("standalone serves", grpc=line["grpc"], admin=line["admin"])


def needed_by(
    child: Child, children: Sequence[Child], settings: StandaloneSettings
) -> Sequence[Child]:
    """Return the children that must serve before another one starts.

    Proxies and the admin process call the brokers, and would log each failed call.
    """
    brokers = children[: len(brokers_of(settings))]
    return () if child in brokers or child.name == CONTROLLER else brokers


def stages_of(children: Sequence[Child], settings: StandaloneSettings) -> list[Sequence[Child]]:
    """Return the groups of children to stop, in order: clients, controller, brokers.

    A controller that outlives the brokers would elect masters and raise alarms.
    """
    count = len(brokers_of(settings))
    others = [child for child in children[count:] if child.name != CONTROLLER]
    controllers = [child for child in children if child.name == CONTROLLER]
    return [others, *([controllers] if controllers else []), children[:count]]
