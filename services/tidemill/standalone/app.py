"""The supervisor: start brokers, proxies and admin, say where they serve, stop them in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence

import structlog

from tidemill.common.lifecycle import StartError, stop_on_signal
from tidemill.common.log import configure_logging
from tidemill.common.parent import die_with_parent
from tidemill.standalone.child import Addresses, Child, ChildFailure
from tidemill.standalone.places import (
    CONTROLLER,
    StandaloneBroker,
    brokers_of,
    check_all_served,
    group_store_of,
)
from tidemill.standalone.ports import GRPC_FLAGS, PortRequest, check_free, reserve
from tidemill.standalone.settings import StandaloneSettings

log = structlog.get_logger()

MIN_IN_SYNC = 2  # of a group's replicas: with one, an OK could be of a message that only it has


def main(arguments: Sequence[str]) -> int:
    """Run everything until SIGTERM; return the exit status."""
    settings = StandaloneSettings.load(arguments)
    configure_logging(
        process="standalone", level=settings.log_level, log_format=settings.log_format
    )
    if settings.supervisor_fd is not None:
        die_with_parent()
    try:
        return asyncio.run(serve(settings))
    except StartError as refusal:
        log.error("process refused to start", reason=str(refusal))  # noqa: TRY400  # It says all.
        return 1


async def serve(settings: StandaloneSettings) -> int:
    """Run the children until the first signal, then stop them: clients first, the store last."""
    if settings.replicas == MIN_IN_SYNC:
        log.warning(
            "two replicas stop when either is away: with three, one may be",
            replicas=settings.replicas,
            min_in_sync=MIN_IN_SYNC,
        )
    with planned_children(settings) as children:
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
            runs = {child: asyncio.create_task(child.run(), name=child.name) for child in children}
            status = await supervise(children, list(runs.values()), stop)
            log.info("standalone stops")
            for stage in stages:
                await stop_children(stage, runs, settings.stop_timeout_ms)
    return status


async def supervise(
    children: Sequence[Child], runs: Sequence[asyncio.Task[None]], stop: asyncio.Event
) -> int:
    """Print the ready line when all children serve; return once stopped or one cannot start."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    ready = asyncio.create_task(all_ready(children), name="ready")
    waiting: set[asyncio.Task[None] | asyncio.Task[bool]] = {*runs, ready, stopped}
    try:
        while not stop.is_set():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for run in runs:
                if run in done and (failure := run.exception()) is not None:
                    log.error("a process could not start", reason=str(failure))
                    return failure.status if isinstance(failure, ChildFailure) else 1
            if ready in done:
                print_ready(children)
    finally:
        stopped.cancel()
        ready.cancel()
    return 0


async def all_ready(children: Sequence[Child]) -> None:
    """Return when every child has announced itself."""
    for child in children:
        await child.is_ready.wait()


async def stop_children(
    children: Sequence[Child], runs: dict[Child, asyncio.Task[None]], timeout_ms: int
) -> None:
    """Stop `children` together; kill those that take longer than `timeout_ms`."""
    for child in children:
        child.stop()
        if child.pid == 0:
            runs[child].cancel()  # It waits to be started again.
    tasks = [runs[child] for child in children]
    _, late = await asyncio.wait(tasks, timeout=timeout_ms / 1000)
    if late:
        log.warning("killing what did not stop in time", children=[t.get_name() for t in late])
        for child in children:
            child.kill()
        await asyncio.wait(tasks)


def print_ready(children: Sequence[Child]) -> None:
    """Print where everything is: the one line on standard output."""
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
    if "scaler" in by_name["admin"].addresses:
        line["scaler"] = by_name["admin"].addresses["scaler"]
    try:
        # Not buffered, so that what cannot be written does not fail again at the end.
        os.write(sys.stdout.fileno(), (json.dumps(line) + "\n").encode())
    except OSError as error:
        log.warning("the ready line could not be written", reason=str(error))
    log.info("standalone serves", grpc=line["grpc"], admin=line["admin"])


@contextlib.contextmanager
def planned_children(settings: StandaloneSettings) -> Iterator[list[Child]]:
    """Yield the children, in the order of `child_names`; holds reserved ports meanwhile."""
    check_all_served(settings)
    check_free(wanted_ports(settings))
    with contextlib.ExitStack() as reserved:
        brokers = brokers_of(settings)

        def reserve_local(wanted: int = 0) -> int:
            port: int = reserved.enter_context(reserve("127.0.0.1", wanted)).getsockname()[1]
            return port

        broker_ports = {broker.name: reserve_local() for broker in brokers}
        # One a broker group: from any replica's address the others of it are found.
        seeds = [broker_ports[broker.name] for broker in brokers if broker.replica <= 0]
        controller_port = reserve_local(settings.controller_port) if settings.replicas > 1 else 0
        to_controllers = [f"--controllers=127.0.0.1:{controller_port}"] if controller_port else []
        grpc_port = settings.grpc_port
        if settings.proxies > 1:
            # One alone does not share its port: two standalones would, by accident.
            shared = reserve(settings.grpc_host, grpc_port)
            grpc_port = reserved.enter_context(shared).getsockname()[1]
        metrics_ports = metrics_ports_of(settings)

        def common(name: str, addresses: Addresses) -> list[str]:
            port = port_of(addresses.get("metrics"), metrics_ports[name])
            flags = [
                f"--cluster={settings.cluster}",
                f"--log-level={settings.log_level}",
                f"--log-format={settings.log_format}",
                f"--metrics-host={settings.metrics_host}",
                f"--metrics-port={port}",
            ]
            return [*flags, f"--config={settings.config}"] if settings.config else flags

        def controller(addresses: Addresses) -> list[str]:
            return [
                "controller",
                *common(CONTROLLER, addresses),
                f"--name={CONTROLLER}",
                f"--group-store={group_store_of(settings)}",
                f"--min-in-sync={MIN_IN_SYNC}",
                "--grpc-host=127.0.0.1",
                f"--grpc-port={controller_port}",
                "--grpc-reuse-port",
            ]

        def broker(one: StandaloneBroker, addresses: Addresses) -> list[str]:
            return [
                "broker",
                *common(one.name, addresses),
                f"--name={one.group}",
                f"--data-dir={one.data_dir}",
                "--grpc-host=127.0.0.1",
                f"--grpc-port={broker_ports[one.name]}",
                "--grpc-reuse-port",
                "--auto-create" if settings.auto_create else "--no-auto-create",
                *replica_flags(one),
            ]

        def replica_flags(one: StandaloneBroker) -> list[str]:
            if one.replica < 0:
                return []
            names = f"--replica-name={one.name}", f"--replica-id={one.replica}"
            return [*names, *to_controllers]

        def proxy(name: str, addresses: Addresses) -> list[str]:
            is_shared = settings.proxies > 1
            return [
                "proxy",
                *common(name, addresses),
                f"--name={name}",
                *(f"--brokers=127.0.0.1:{port}" for port in seeds),
                *to_controllers,
                f"--grpc-host={settings.grpc_host}",
                f"--grpc-port={port_of(addresses.get('grpc'), grpc_port)}",
                "--drain-delay-ms=0",  # Nobody is in front who would have to hear of it.
                "--reuse-port" if is_shared else "--no-reuse-port",
                f"--tls={settings.tls}",
                f"--tls-certificate-file={settings.tls_certificate_file}",
                f"--tls-key-file={settings.tls_key_file}",
                f"--tls-client-ca-file={settings.tls_client_ca_file}",
                *(f"--proxy-protocol-from={network}" for network in settings.proxy_protocol_from),
            ]

        def admin(addresses: Addresses) -> list[str]:
            return [
                "admin",
                *common("admin", addresses),
                *(f"--broker=127.0.0.1:{port}" for port in seeds),
                *to_controllers,
                "--drain-delay-ms=0",
                f"--host={settings.admin_host}",
                f"--port={port_of(addresses.get('admin'), settings.admin_port)}",
                *(f"--admin-hosts={host}" for host in settings.admin_hosts),
                f"--admin-token-file={settings.admin_token_file}",
                f"--admin-body-bytes-max={settings.admin_body_bytes_max}",
                f"--admin-tls-certificate-file={settings.admin_tls_certificate_file}",
                f"--admin-tls-key-file={settings.admin_tls_key_file}",
                *scaler_flags(settings, addresses),
            ]

        yield [
            *(Child(one.name, functools.partial(broker, one)) for one in brokers),
            *(Child(name, functools.partial(proxy, name)) for name in proxy_names(settings)),
            Child("admin", admin),
            *([Child(CONTROLLER, controller)] if controller_port else []),
        ]


def scaler_flags(settings: StandaloneSettings, addresses: Addresses) -> list[str]:
    """Return how the admin process serves KEDA, if it does."""
    if settings.scaler_port is None:
        return []
    return [
        f"--scaler-host={settings.scaler_host}",
        f"--scaler-port={port_of(addresses.get('scaler'), settings.scaler_port)}",
        f"--scaler-tls-certificate-file={settings.scaler_tls_certificate_file}",
        f"--scaler-tls-key-file={settings.scaler_tls_key_file}",
        f"--scaler-tls-client-ca-file={settings.scaler_tls_client_ca_file}",
    ]


def proxy_names(settings: StandaloneSettings) -> list[str]:
    """Return the names of the proxies."""
    return [f"proxy-{n}" for n in range(settings.proxies)]


def child_names(settings: StandaloneSettings) -> list[str]:
    """Return the names of the children, in the order of their metrics ports."""
    controllers = [CONTROLLER] if settings.replicas > 1 else []
    brokers = [broker.name for broker in brokers_of(settings)]
    return [*brokers, *proxy_names(settings), "admin", *controllers]


def stages_of(children: Sequence[Child], settings: StandaloneSettings) -> list[Sequence[Child]]:
    """Return who is stopped together, in order: clients first, then stores, who decides last."""
    count = len(brokers_of(settings))
    others = [child for child in children[count:] if child.name != CONTROLLER]
    controllers = [child for child in children if child.name == CONTROLLER]
    return [others, children[:count], *([controllers] if controllers else [])]


def metrics_ports_of(settings: StandaloneSettings) -> dict[str, int]:
    """Return the metrics port of each child by its name; 0: a free one."""
    return {
        name: settings.metrics_port + n if settings.metrics_port else 0
        for n, name in enumerate(child_names(settings))
    }


def wanted_ports(settings: StandaloneSettings) -> list[PortRequest]:
    """Return the ports of all children, in the order in which a taken one is told."""
    wanted = [
        PortRequest(settings.grpc_host, settings.grpc_port, GRPC_FLAGS, "clients"),
        PortRequest(
            settings.admin_host,
            settings.admin_port,
            ("--admin-host", "--admin-port"),
            "the REST API",
        ),
    ]
    if settings.scaler_port is not None:
        flags = "--scaler-host", "--scaler-port"
        wanted.append(PortRequest(settings.scaler_host, settings.scaler_port, flags, "KEDA"))
    for name, port in metrics_ports_of(settings).items():
        flags = "--metrics-host", "--metrics-port"
        wanted.append(PortRequest(settings.metrics_host, port, flags, f"metrics of {name}"))
    return wanted


def port_of(address: str | None, otherwise: int) -> int:
    """Return the port in an address like host:port or http://host:port/path."""
    if address is None:
        return otherwise
    place = address.partition("://")[2] or address
    return int(place.partition("/")[0].rpartition(":")[2])
