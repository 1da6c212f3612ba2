"""The plan of a standalone: its children, their order and their ports."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.standalone.broker_stores import (
    CONTROLLER,
    brokers_of,
    check_all_served,
    check_not_used,
)
from tidemill.standalone.child import Child
from tidemill.standalone.command_lines import ChildPorts, CommandLines
from tidemill.standalone.ports import GRPC_FLAGS, PortRequest, check_free, reserve

if TYPE_CHECKING:
    from tidemill.standalone.forks import RunToEnd
    from tidemill.standalone.settings import StandaloneSettings


@contextlib.contextmanager
def planned_children(settings: StandaloneSettings, run_to_end: RunToEnd) -> Iterator[list[Child]]:
    """Yield the children in the order of `child_names`; hold the reserved ports meanwhile."""
    check_all_served(settings)
    check_free(requested_ports(settings))
    check_not_used(settings)
    with contextlib.ExitStack() as stack:
        commands = CommandLines(settings, reserve_ports(settings, stack))
        yield [
            *(
                Child(broker.name, functools.partial(commands.broker, broker), run_to_end)
                for broker in brokers_of(settings)
            ),
            *(
                Child(name, functools.partial(commands.proxy, name), run_to_end)
                for name in proxy_names(settings)
            ),
            Child("admin", commands.admin, run_to_end),
            *(
                [Child(CONTROLLER, commands.controller, run_to_end)]
                if settings.replicas > 1
                else []
            ),
        ]


def reserve_ports(settings: StandaloneSettings, stack: contextlib.ExitStack) -> ChildPorts:
    """Reserve the ports that children must know of each other, until `stack` is closed."""

    def reserve_port(host: str, port: int) -> int:
        return stack.enter_context(reserve(host, port))

    brokers = brokers_of(settings)
    broker_ports = {broker.name: reserve_port("127.0.0.1", 0) for broker in brokers}
    controller_port = 0
    if settings.replicas > 1:
        controller_port = reserve_port("127.0.0.1", settings.controller_port)
    grpc_port = settings.grpc_port
    # A single proxy does not share its port. Otherwise two standalones could share it by accident.
    if settings.proxies > 1:
        grpc_port = reserve_port(settings.grpc_host, grpc_port)
    return ChildPorts(
        grpc=grpc_port,
        brokers=broker_ports,
        seeds=[broker_ports[broker.name] for broker in brokers if broker.replica <= 0],
        controller=controller_port,
        metrics=metrics_ports_of(settings),
    )


def proxy_names(settings: StandaloneSettings) -> list[str]:
    """Return the names of the proxies."""
    return [f"proxy-{n}" for n in range(settings.proxies)]


def child_names(settings: StandaloneSettings) -> list[str]:
    """Return the names of the children, in the order of their metrics ports."""
    controllers = [CONTROLLER] if settings.replicas > 1 else []
    brokers = [broker.name for broker in brokers_of(settings)]
    return [*brokers, *proxy_names(settings), "admin", *controllers]


def metrics_ports_of(settings: StandaloneSettings) -> dict[str, int]:
    """Return the metrics port of each child by its name; 0: a free one."""
    return {
        name: settings.metrics_port + n if settings.metrics_port else 0
        for n, name in enumerate(child_names(settings))
    }


def requested_ports(settings: StandaloneSettings) -> list[PortRequest]:
    """Return the ports of all children, in the order in which they are checked."""
    requests = [
        PortRequest(settings.grpc_host, settings.grpc_port, GRPC_FLAGS, "clients"),
        PortRequest(
            settings.admin_host,
            settings.admin_port,
            ("--admin-host", "--admin-port"),
            "the REST API",
        ),
    ]
    if settings.admin_grpc_port is not None:
        flags = "--admin-host", "--admin-grpc-port"
        service = "the gRPC service Admin"
        requests.append(PortRequest(settings.admin_host, settings.admin_grpc_port, flags, service))
    if settings.scaler_port is not None:
        flags = "--scaler-host", "--scaler-port"
        requests.append(PortRequest(settings.scaler_host, settings.scaler_port, flags, "KEDA"))
    for name, port in metrics_ports_of(settings).items():
        flags = "--metrics-host", "--metrics-port"
        requests.append(PortRequest(settings.metrics_host, port, flags, f"metrics of {name}"))
    return requests
