"""A hostile client and an honest client for a real proxy on loopback.

The hostile client, `Stranger`, writes bytes to a socket that no library would send: gzip bombs,
closed windows, thousands of calls at once. The honest client sends a small message every few
milliseconds. It measures each call from its planned time, so a stall of the server counts for every
call that was planned meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import select
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from tests.support.clients import http2_peer as peer
from tests.support.clients.rpc_server import GREETING, RawClient
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import Setting

HONEST_PERIOD_S = 0.01  # between two sends
STALL_S_MAX = 120.0  # a longer stall counts as a dead server
HONEST_TOPIC = "honest"
GROUP = "strangers"
TOPIC = "strange"
# No window for responses: the server sends no body until the stranger opens a window.
CLOSED = frames.PREFACE + peer.settings({Setting.INITIAL_WINDOW_SIZE: 0})


def path_of(method: str) -> str:
    return f"/apache.rocketmq.v2.MessagingService/{method}"


def fields_of(method: str, *more: tuple[str, str], client_id: str = "stranger") -> peer.Fields:
    return (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path_of(method)),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("x-mq-client-id", client_id),
        *more,
    )


@functools.lru_cache(maxsize=16)  # Compression is the stranger's largest cost.
def deflated(message: bytes) -> bytes:
    """Return a gRPC message with the best gzip compression."""
    packer = zlib.compressobj(9, wbits=31)
    return peer.grpc_message(packer.compress(message) + packer.flush(), compressed=1)


def poll(*, wait_s: int = 20, **more: Any) -> service.ReceiveMessageRequest:
    return service.ReceiveMessageRequest(
        group=v2.Resource(name=GROUP),
        message_queue=v2.MessageQueue(topic=v2.Resource(name=TOPIC)),
        batch_size=32,
        invisible_duration=Duration(seconds=60),
        long_polling_timeout=Duration(seconds=wait_s),
        **more,
    )


def message(body: bytes = b"x", topic: str = TOPIC, **properties: Any) -> v2.Message:
    made = v2.Message(
        topic=v2.Resource(name=topic),
        body=body,
        system_properties=v2.SystemProperties(
            **{
                "message_id": "01" + "0A" * 16,
                "body_encoding": v2.IDENTITY,
                "message_type": v2.NORMAL,
                "born_host": "stranger",
                **properties,
            }
        ),
    )
    made.system_properties.born_timestamp.GetCurrentTime()
    return made


def send_of(*messages: v2.Message) -> service.SendMessageRequest:
    return service.SendMessageRequest(messages=messages)


class Stranger(RawClient):
    """One connection that may send any bytes."""

    def __init__(self, address: str, greeting: bytes = GREETING) -> None:
        super().__init__(int(address.rpartition(":")[2]), greeting)
        self._next_id = 1
        self.sent_bytes = 0

    def begin(self, *calls: bytes) -> None:
        """Send, unless the server has already closed the connection."""
        raw = b"".join(calls)
        self.sent_bytes += len(raw)
        self.send_if_open(raw)

    def call_of(
        self,
        method: str,
        request: Message | bytes,
        *more: tuple[str, str],
        is_deflated: bool = False,
        is_last: bool = True,
        **named: str,
    ) -> bytes:
        """Return the first bytes of a call. The caller splits a body larger than a window."""
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        encoding = (("grpc-encoding", "gzip"),) if is_deflated else ()
        content = deflated(raw) if is_deflated else peer.grpc_message(raw)
        stream_id, self._next_id = self._next_id, self._next_id + 2
        begun = peer.headers(stream_id, fields_of(method, *encoding, *more, **named))
        pieces = [content[at : at + 16_384] for at in range(0, len(content), 16_384)]
        return begun + b"".join(
            peer.data(stream_id, piece, is_last=is_last and number == len(pieces) - 1)
            for number, piece in enumerate(pieces)
        )

    def until_end_of(self, stream_id: int) -> peer.Frame:
        """Read until a call ends."""
        return self.until(lambda one: one.stream_id == stream_id and one.is_last)

    def read_for(self, duration_s: float) -> None:
        """Read frames for `duration_s`."""
        end_s = time.monotonic() + duration_s
        while not self.is_ended and (left_s := end_s - time.monotonic()) > 0:
            if select.select([self.socket], [], [], left_s)[0]:
                self.read()

    def answers(self) -> Counter[str]:
        """Return the ends of calls so far: by gRPC status, by reset, or with the connection."""
        found: Counter[str] = Counter()
        for one in self.frames:
            if one.kind == frames.HEADERS and one.is_last:
                found["status " + peer.fields_of(one.payload).get("grpc-status", "?")] += 1
            elif one.kind == frames.RST_STREAM:
                found[f"reset {one.number}"] += 1
            elif one.kind == frames.GOAWAY:
                found[f"goaway {int.from_bytes(one.payload[4:8], 'big')}"] += 1
        return found

    def codes(self) -> Counter[int]:
        """Return the counts of the protocol's status codes in the responses so far."""
        bodies: dict[int, bytes] = {}
        for one in self.frames:
            if one.kind == frames.DATA:
                bodies[one.stream_id] = bodies.get(one.stream_id, b"") + one.payload
        return Counter(
            service.HeartbeatResponse.FromString(
                body[5 : 5 + int.from_bytes(body[1:5], "big")]
            ).status.code
            for body in bodies.values()
            if len(body) >= 5 + int.from_bytes(body[1:5], "big")
        )


# ---------------------------------------------------------------- the honest client


class HonestClient:
    """A client in its own process that sends a small message every few milliseconds."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.clients.hostile_client", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def stop(self) -> dict[str, float]:
        """Stop the client; return its send times in milliseconds and the number of rejections."""
        output, _ = self._process.communicate("stop\n", timeout=60)
        result = json.loads(output)
        assert isinstance(result, dict)
        return result


@contextlib.contextmanager
def honest(address: str) -> Iterator[HonestClient]:
    client = HonestClient(address)
    try:
        yield client
    finally:
        client._process.kill()
        client._process.wait()


def _be_honest(address: str) -> None:
    client = Stranger(address)
    client.socket.settimeout(STALL_S_MAX)
    request = send_of(message(b"h" * 100, HONEST_TOPIC))
    for _ in range(10):  # This creates the topic and fills caches.
        client.send(client.call_of("SendMessage", request, client_id="honest"))
        client.until_end_of(client._next_id - 2)
    client.frames.clear()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    took_ms: list[float] = []
    codes: Counter[int] = Counter()
    # Planned time of each send. A send does not wait for others.
    meant_s: dict[int, float] = {}
    next_s = time.monotonic()
    is_stopped = False
    while meant_s or not is_stopped:
        now_s = time.monotonic()
        while not is_stopped and next_s <= now_s:
            meant_s[client._next_id] = next_s
            client.send(client.call_of("SendMessage", request, client_id="honest"))
            next_s += HONEST_PERIOD_S
        wait_s = STALL_S_MAX if is_stopped else max(next_s - time.monotonic(), 0)
        readable = select.select(
            [client.socket, *([] if is_stopped else [sys.stdin])], [], [], wait_s
        )
        is_stopped |= sys.stdin in readable[0]
        if client.socket not in readable[0]:
            continue
        client.read()
        assert not client.is_ended, "the honest client was closed"
        now_s = time.monotonic()
        took_ms += [
            (now_s - meant_s.pop(one.stream_id)) * 1000
            for one in client.frames
            if one.is_last and one.stream_id in meant_s
        ]
        codes += client.codes()
        client.frames.clear()
    took_ms.sort()
    sys.stdout.write(
        json.dumps(
            {
                "sends": len(took_ms),
                "refused": codes[v2.TOO_MANY_REQUESTS],
                "failed": codes.total() - codes[v2.OK] - codes[v2.TOO_MANY_REQUESTS],
                "p50_ms": round(took_ms[len(took_ms) // 2], 1),
                "p99_ms": round(took_ms[len(took_ms) * 99 // 100], 1),
                "max_ms": round(took_ms[-1], 1),
            }
        )
    )


# ---------------------------------------------------------------- memory

SAMPLE_PERIOD_S = 0.01


def memory_mib(pid: int) -> float:
    """Return the private memory of a process, without mapped files."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


class Peaks:
    """The peak memory of processes, sampled every few milliseconds."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.before_mib = {name: memory_mib(pid) for name, pid in pids.items()}
        self.peak_mib = dict(self.before_mib)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="peaks")
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(SAMPLE_PERIOD_S):
            for name, pid in self._pids.items():
                self.peak_mib[name] = max(self.peak_mib[name], memory_mib(pid))

    def stop(self) -> dict[str, float]:
        """Return the largest growth by process."""
        self._is_over.set()
        self._thread.join()
        return {
            name: round(peak - self.before_mib[name], 1) for name, peak in self.peak_mib.items()
        }


if __name__ == "__main__":
    _be_honest(sys.argv[1])
