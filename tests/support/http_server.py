"""An HTTP server for tests, with room for the connections of a busy machine."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from typing import final


@final
class PatientHTTPServer(ThreadingHTTPServer):
    """A threading server that does not lose connections while its thread waits for a core."""

    # The standard library's 5 overflow under load. A client whose connection is lost then repeats
    # it after 1, 3, 7 and 15 s.
    request_queue_size = 128
