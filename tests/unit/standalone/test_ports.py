"""Errors for ports in use; they do not depend on the order of the processes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tidemill.common.addresses import PORT_MAX
from tidemill.common.lifecycle import StartError
from tidemill.standalone.child_plan import requested_ports
from tidemill.standalone.ports import check_free
from tidemill.standalone.settings import StandaloneSettings

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def ports(count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]


def number_of(taken: socket.socket) -> int:
    return int(taken.getsockname()[1])


def settings_of(**ports: int) -> StandaloneSettings:
    return StandaloneSettings.load(
        [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
    )


def refusal(**ports: int) -> str:
    with pytest.raises(StartError) as refused:
        check_free(requested_ports(settings_of(**ports)))
    return str(refused.value)


def test_the_first_port_in_use_is_named_with_its_flag() -> None:
    with ports(3) as taken:
        grpc, admin, metrics = map(number_of, taken)
        wanted = {"grpc_port": grpc, "admin_port": admin, "metrics_port": metrics}
        for name, port in wanted.items():
            flag = f"--{name.replace('_', '-')}"
            assert refusal(**wanted) == (
                f"cannot listen on {LOOPBACK}:{port}: the port is in use; stop the process "
                f"that uses it, or change {flag}"
            )
            wanted[name] = 0


def test_a_port_of_a_later_child_is_tried_too() -> None:
    with ports(1) as (taken,):
        first = number_of(taken) - 2  # Of the broker; that of the admin process is the third.
        reason = refusal(grpc_port=0, admin_port=0, metrics_port=first)
    assert reason.endswith("or change --metrics-port")


def test_a_port_for_two_children_is_named_with_both_flags() -> None:
    with ports(1) as (free,):
        port = number_of(free)
    assert refusal(grpc_port=port, admin_port=0, metrics_port=port - 1) == (
        f"port {port} is requested twice, for clients and for metrics of proxy-0; change "
        f"--grpc-port or --metrics-port"
    )


def test_metrics_ports_end_at_the_highest_port() -> None:
    assert refusal(grpc_port=0, admin_port=0, metrics_port=PORT_MAX) == (
        f"port {PORT_MAX + 1} for metrics of proxy-0 is higher than {PORT_MAX}; "
        f"lower --metrics-port"
    )


def test_free_ports_are_not_checked() -> None:
    check_free(requested_ports(settings_of(grpc_port=0, admin_port=0, metrics_port=0)))
