"""The health endpoints of a broker that opens its store.

A start reads the log since the last checkpoint, or the whole log, in one call that blocks the event
loop. Probes of `/livez` must succeed meanwhile. Otherwise kubelet or another supervisor kills the
process, and the next start has to read the log again. So a thread answers the probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from tidemill.common.lifecycle import StartError
from tidemill.common.metrics import Registry
from tidemill.common.metrics_server import MetricsServer
from tidemill.common.readiness import ProcessReadiness
from tidemill.common.scrape_access import ScrapeAccess


@contextlib.contextmanager
def reporting_startup(
    registry: Registry, host: str, port: int, access: ScrapeAccess
) -> Iterator[None]:
    """Serve `/livez`, and `/readyz` with `starting`, from a thread until the block ends.

    Raises StartError if the port is in use. Does nothing for port 0, because no prober knows the
    port yet.
    """
    if port == 0:
        yield
        return
    began: Future[asyncio.AbstractEventLoop] = Future()
    ended = asyncio.Event()

    async def serve() -> None:
        # Its phase is `starting` for as long as this lasts.
        async with MetricsServer(registry, ProcessReadiness(), access=access).serving(host, port):
            began.set_result(asyncio.get_running_loop())
            await ended.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except StartError as error:
            began.set_exception(error)
        finally:
            began.cancel()  # After any other error the waiting thread must not wait forever.

    thread = threading.Thread(target=run, name="starting", daemon=True)
    thread.start()
    loop = began.result()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # The loop has failed and is closed.
            loop.call_soon_threadsafe(ended.set)
        thread.join()
