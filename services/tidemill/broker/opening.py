"""What a broker says of itself while its store is opened.

A start reads the log since the last checkpoint, as a whole where there is none, in one call that
the event loop waits for. Whoever asks `/livez` meanwhile must be told that the process lives, or a
supervisor such as kubelet kills it, and the next start begins anew. So another thread answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from tidemill.common.lifecycle import StartError
from tidemill.common.metrics import MetricsServer, Registry
from tidemill.common.readiness import ProcessReadiness


@contextlib.contextmanager
def told_to_be_starting(registry: Registry, host: str, port: int) -> Iterator[None]:
    """Serve `/livez`, and `/readyz` that says `starting`, from a thread until the block ends.

    Raises StartError when the port is taken. Of port 0 nobody can know, so nobody asks there.
    """
    if port == 0:
        yield
        return
    began: Future[asyncio.AbstractEventLoop] = Future()
    ended = asyncio.Event()

    async def serve() -> None:
        # Its phase is `starting` for as long as this lasts.
        async with MetricsServer(registry, ProcessReadiness()).serving(host, port):
            began.set_result(asyncio.get_running_loop())
            await ended.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except StartError as error:
            began.set_exception(error)
        finally:
            began.cancel()  # where it has not begun for any other reason: nobody waits for it

    thread = threading.Thread(target=run, name="starting", daemon=True)
    thread.start()
    loop = began.result()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # its loop has failed, and is closed
            loop.call_soon_threadsafe(ended.set)
        thread.join()
