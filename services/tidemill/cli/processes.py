"""The commands that start a process. Each imports what it needs when it runs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def broker(arguments: Sequence[str]) -> int:
    """Store messages, and hand them to consumers through the proxies."""
    from tidemill.broker.app import main

    return main(arguments)


def proxy(arguments: Sequence[str]) -> int:
    """Serve RocketMQ 5 clients."""
    from tidemill.common.lifecycle import run
    from tidemill.common.log import configure_logging
    from tidemill.common.parent import die_with_parent
    from tidemill.proxy.app import serve
    from tidemill.proxy.settings import ProxySettings

    settings = ProxySettings.load(arguments)
    configure_logging(
        process=settings.name or settings.command,
        level=settings.log_level,
        log_format=settings.log_format,
    )
    if settings.keeper_fd is None:
        die_with_parent()
    return run(lambda: serve(settings))


def controller(arguments: Sequence[str]) -> int:
    """Watch over the replicas of broker groups, and decide which of them is master."""
    from tidemill.controller.app import main

    return main(arguments)


def admin(arguments: Sequence[str]) -> int:
    """Serve the REST API for topics, groups and messages."""
    from tidemill.admin.process import main

    return main(arguments)


def standalone(arguments: Sequence[str]) -> int:
    """Run everything on this machine, data in one folder."""
    from tidemill.__main__ import run_to_end
    from tidemill.standalone.app import main

    return main(arguments, run_to_end)


PROCESSES: dict[str, Callable[[Sequence[str]], int]] = {
    "standalone": standalone,
    "broker": broker,
    "proxy": proxy,
    "controller": controller,
    "admin": admin,
}
