"""The link of a replica to the controllers, in two processes.

    broker ── frames.py over a socket pair ──▶ supervisor ── Session streams ──▶ every controller

    frames.py      messages of a session with their sizes, for the socket pair
    port.py        the broker's end: registers, reports its state 20 times a second, proposes
    sessions.py    the supervisor's decisions, without I/O: requests, heartbeats, repetitions
    streams.py     the supervisor's connections to controllers
    supervisor.py  the process: starts the broker, reports its death at once, stops it in order

The supervisor owns the sessions, so that a controller can distinguish a broker that stands still
from a dead one. Neither process waits for the garbage collection of the other.
"""
