"""A replica's ties to the controllers, in two processes (failover.md 7).

    broker ── frames.py over a socket pair ──▶ supervisor ── Session streams ──▶ every controller

    frames.py      what goes over the socket pair: the messages of a session, with their sizes
    port.py        the broker's end: registers, says how it is 20 times a second, proposes, learns
    sessions.py    the supervisor's decisions, without I/O: whom to tell what, and what again
    streams.py     the supervisor's connections to controllers
    supervisor.py  the process: starts the broker, says at once that it has died, stops it in order

The sessions are the supervisor's, so that a broker that cannot turn is told from one that has died,
and neither waits for the other's garbage collection.
"""
