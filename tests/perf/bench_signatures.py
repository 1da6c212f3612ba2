"""What does a signed call cost a proxy above an unsigned one?

One gate in memory with one user of 20 entries and the number of secrets in SECRETS. A call checks
its client, its credentials and the right to publish to a topic, as a send does. Measured: the CPU
time of a call without headers in the mode off, of a signed call whose headers the proxy knows, and
of one whose headers it does not know. The goals are 2 us and 8 us above the call without headers.

    python -m tests.perf.bench_signatures
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Mapping, Sequence

from tests.support.worlds.access_world import AccessWorld, signed
from tidemill.message.client_key import ClientKey
from tidemill.proxy.server.call import CLIENT_ID, Call
from tidemill.security.acl import Action, parse_entry
from tidemill.security.table import Mode

USER, TOPIC = "orders", "orders-0"
ENTRIES = 20
SECRETS = {"one_secret": ["a secret of sixteen"], "two_secrets": ["a secret of sixteen", "b" * 43]}
CALLS = 2_000  # of one run; unknown headers are different in each call
RUNS = 50  # The least time counts: other processes only add to it.
METHOD = "send_message"

Headers = Mapping[str, str]


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    figures = {name: _measure(secrets, options.runs) for name, secrets in SECRETS.items()}
    print(json.dumps({"load": os.getloadavg()[0], **figures}))


def _measure(secrets: Sequence[str], runs: int) -> dict[str, float]:
    """Return the least CPU times of a call in microseconds."""
    off, on = AccessWorld(Mode.OFF), AccessWorld(Mode.ON)
    entries = [parse_entry(f"Topic:orders-{n}", ("Pub",)) for n in range(ENTRIES)]
    on.put_user(USER, *entries, secrets=secrets)
    known = _headers(secrets[-1], 0)
    unsigned_us, known_us, unknown_us = [], [], []
    _time_calls(on, [known])  # Decrypts the secrets.
    gc.disable()  # As between two collections of a proxy.
    for run in range(1, runs + 1):
        unsigned_us.append(_time_calls(off, [{CLIENT_ID: "client-1"}] * CALLS))
        known_us.append(_time_calls(on, [known] * CALLS))
        fresh = [_headers(secrets[-1], run * CALLS + n) for n in range(CALLS)]
        unknown_us.append(_time_calls(on, fresh))
        gc.collect()
    gc.enable()
    unsigned = min(unsigned_us)
    return {
        "unsigned_cpu_us": round(unsigned, 2),
        "known_above_cpu_us": round(min(known_us) - unsigned, 2),
        "unknown_above_cpu_us": round(min(unknown_us) - unsigned, 2),
    }


def _headers(secret: str, number: int) -> Headers:
    return {CLIENT_ID: "client-1", **signed(USER, secret, f"2026{number:011}Z")}


def _time_calls(world: AccessWorld, headers: Sequence[Headers]) -> float:
    """Return the CPU time of a call in microseconds."""
    gate, connection = world.gate, ClientKey("client-1")

    def peer() -> str:
        return "ipv4:10.1.2.3:4711"

    begin_s = time.process_time()
    for each in headers:
        call = Call(each, peer=peer, connection=connection, time_remaining_s=3.0, gate=gate)
        call.method = METHOD
        call.check()
        call.require_topic(TOPIC, Action.PUB)
    return (time.process_time() - begin_s) * 1e6 / len(headers)


if __name__ == "__main__":
    main()
