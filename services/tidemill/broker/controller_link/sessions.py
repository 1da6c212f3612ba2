"""The sessions of a replica's supervisor with the controllers: decisions without I/O and clocks.

    receive_from_broker(up)            Register, Heartbeat, Proposal or Release of the broker
    note_broker_end(how)               the broker's process ended
    note_connection(i)                 a stream to a controller is open
    note_disconnection(i)              a stream to a controller ended
    receive_from_controller(i, down)   a message of a controller
    tick()                             at least every HEARTBEAT_MS
    take_actions()                     after each event

Each controller accepts each request, and the record decides. So a request without an answer is
repeated at another controller. While no controller is connected, the broker keeps its view (F-18).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, final

from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication

HEARTBEAT_MS: Final = 200  # a fifth of the default session_timeout_ms
REQUEST_AGAIN_MS: Final = 1_000  # the time-out of a controller's store
# Requests in flight, more than the registration, proposal and release of one broker.
REQUESTS_MAX: Final = 16


class ToController(NamedTuple):
    """A message for a controller."""

    controller: int
    message: wire.SessionUp


class ToBroker(NamedTuple):
    """A message for the broker."""

    message: wire.SessionDown


class StopBroker(NamedTuple):
    """An order to kill the broker: another run of this replica has registered."""

    why: str


Action: TypeAlias = ToController | ToBroker | StopBroker


@dataclass(slots=True)
class _Stream:
    """An open stream."""

    is_welcomed: bool = False
    is_leading: bool = False
    registered: str = ""  # the incarnation in the record when this supervisor attached
    beat_at_ms: int = 0  # the time of the last heartbeat
    has_death: bool = False  # the death of the last run was sent


class _Request(NamedTuple):
    """A request in flight."""

    controller: int
    at_ms: int
    number: int  # the number of the broker; 0: the registration, which the supervisor sends


@final
class ControllerSessions:
    """The sessions of one replica with all controllers."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._streams: dict[int, _Stream] = {}
        self._register: wire.Register | None = None
        self._is_registered = False
        self._beat: wire.Heartbeat | None = None
        self._beat_at_ms = 0  # receipt of the last heartbeat, to compute its age
        self._newest = (-1, 0)  # version and feature level of the newest view
        self._member_count = 0  # in the sync state set of the newest view
        self._held: replication.ReplicationView | None = (
            None  # newest view, not sent to the broker yet
        )
        self._death: wire.DeathCertificate | None = None
        self._numbers = 0
        self._requests: dict[int, _Request] = {}  # by number of this supervisor
        # Late requests of the broker. It may still wait for the answer to the last one.
        self._late: dict[int, _Request] = {}
        self._last_asked = -1  # the last controller of a request, while no leader is known
        self._actions: list[Action] = []

    @property
    def has_successor(self) -> bool:
        """Whether a connected controller could elect another member of the sync state set."""
        is_connected = any(stream.is_welcomed for stream in self._streams.values())
        return is_connected and self._member_count > 1

    def take_actions(self) -> list[Action]:
        """Return and clear the actions, in order."""
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ the broker

    def receive_from_broker(self, up: wire.SessionUp, now_ms: int) -> None:
        """Process a message of the broker."""
        match up.WhichOneof("message"):
            case "register":
                # A running broker also registers, as a new run with an empty store.
                self._register, self._beat, self._is_registered = up.register, None, False
                self._requests = {n: one for n, one in self._requests.items() if one.number}
                for controller, stream in self._streams.items():
                    stream.is_welcomed = False
                    self._attach(controller)
            case "heartbeat":
                is_change = self._beat is None or _has_changed(self._beat, up.heartbeat)
                self._beat, self._beat_at_ms = up.heartbeat, now_ms
                if is_change:
                    self._send_heartbeats(now_ms)
            case "proposal" | "release":
                self._request(up, now_ms)
            case _:
                pass  # A message of a newer build.

    def note_broker_end(self, how: str) -> None:
        """Report the end of the broker's process to all controllers at once (D1)."""
        if self._register is None:
            return
        self._death = wire.DeathCertificate(member=self._register.member, how=how)
        self._register, self._beat, self._is_registered = None, None, False
        self._newest, self._held = (-1, 0), None
        self._requests.clear()
        self._late.clear()
        for controller, stream in self._streams.items():
            stream.has_death = True
            self._send(controller, wire.SessionUp(death=self._death))

    # ------------------------------------------------------------ the controllers

    def note_connection(self, controller: int) -> None:
        """Attach on a new stream."""
        self._streams[controller] = _Stream()
        self._attach(controller)

    def note_disconnection(self, controller: int) -> None:
        """Drop a stream that ended. Its requests are repeated on another one."""
        self._streams.pop(controller, None)
        for number in [n for n, one in self._requests.items() if one.controller == controller]:
            del self._requests[number]

    def receive_from_controller(self, controller: int, down: wire.SessionDown, now_ms: int) -> None:
        """Process a message of a controller."""
        stream = self._streams.get(controller)
        if stream is None:
            return
        match down.WhichOneof("message"):
            case "welcome":
                self._note_welcome(stream, down.welcome)
                self._register_if_due(now_ms)
                self._send_heartbeat(controller, now_ms)
            case "view":
                self._note_view(down.view)
            case "beat":
                stream.is_leading = down.beat.is_leading
                self._actions.append(ToBroker(down))
            case "hand_over":
                self._actions.append(ToBroker(down))
            case "answer":
                self._receive_answer(down.answer, now_ms)
            case _:
                pass  # A message of a newer controller.

    def tick(self, now_ms: int) -> None:
        """Repeat late requests, and send due heartbeats."""
        late = [n for n, one in self._requests.items() if now_ms - one.at_ms >= REQUEST_AGAIN_MS]
        for number in late:
            # Its next heartbeat reply sets this again. Until then, ask the other controllers.
            request = self._requests.pop(number)
            self._streams[request.controller].is_leading = False
            if request.number:
                self._late[number] = request
        for number in list(self._late)[:-REQUESTS_MAX]:
            del self._late[number]
        self._register_if_due(now_ms)
        for controller, stream in self._streams.items():
            if stream.is_welcomed and now_ms - stream.beat_at_ms >= HEARTBEAT_MS:
                self._send_heartbeat(controller, now_ms)

    # ------------------------------------------------------------ inside

    def _attach(self, controller: int) -> None:
        source = self._register or self._death
        if source is not None:
            epoch_seen = 0 if self._beat is None else self._beat.epoch_seen
            attach = wire.Attach(group=self._group, member=source.member, epoch_seen=epoch_seen)
            self._send(controller, wire.SessionUp(attach=attach))
        if self._death is not None and not self._streams[controller].has_death:
            self._streams[controller].has_death = True
            # The controller may have been unreachable when the previous run ended.
            self._send(controller, wire.SessionUp(death=self._death))

    def _note_welcome(self, stream: _Stream, welcome: wire.Welcome) -> None:
        stream.is_welcomed, stream.is_leading = True, welcome.is_leading
        stream.registered = welcome.registered_incarnation
        register = self._register
        if register is not None:
            # If the store lost or restored its records, register again.
            self._is_registered = stream.registered == register.member.incarnation
            self._send_view()

    def _register_if_due(self, now_ms: int) -> None:
        """Register, unless this run is registered or its registration is in flight."""
        if self._register is None or self._is_registered:
            return
        if any(one.number == 0 for one in self._requests.values()):
            return
        controller = self._choose_controller()
        if controller is None:
            return
        register = wire.Register()
        register.CopyFrom(self._register)
        register.instead_of = self._streams[controller].registered
        number = self._send(controller, wire.SessionUp(register=register))
        self._requests[number] = _Request(controller, now_ms, 0)

    def _request(self, up: wire.SessionUp, now_ms: int) -> None:
        """Send a request to one controller. The master repeats it until it has an effect."""
        controller = self._choose_controller()
        if controller is None or len(self._requests) >= REQUESTS_MAX:
            return
        broker_number = up.number
        number = self._send(controller, up)
        self._requests[number] = _Request(controller, now_ms, broker_number)

    def _choose_controller(self) -> int | None:
        """Return the leading controller, or the next one if a request to it is in flight."""
        welcomed = sorted(n for n, stream in self._streams.items() if stream.is_welcomed)
        busy = {one.controller for one in self._requests.values()}
        free = [n for n in welcomed if n not in busy] or welcomed
        leading = [n for n in free if self._streams[n].is_leading and n not in busy]
        if leading:
            return leading[0]
        if not free:
            return None
        # All controllers in turn.
        self._last_asked = next((n for n in free if n > self._last_asked), free[0])
        return self._last_asked

    def _receive_answer(self, answer: wire.Answer, now_ms: int) -> None:
        request = self._requests.pop(answer.number, None) or self._late.pop(answer.number, None)
        result = answer.WhichOneof("result")
        if result == "fenced":
            self._actions.append(StopBroker(answer.fenced))
        elif request is None:
            return
        elif request.number:
            answer.number = request.number
            self._actions.append(ToBroker(wire.SessionDown(answer=answer)))
        elif result == "done":
            self._is_registered = True
            self._send_view()
        elif result in ("unavailable", "refused"):
            # Keep the request until it counts as late. An immediate repetition would never end,
            # because a rejected registration waits for another run of the replica.
            self._requests[answer.number] = _Request(request.controller, now_ms, 0)

    def _note_view(self, view: replication.ReplicationView) -> None:
        # A controller of version 0.1.0 sends a version without its feature level.
        if (view.version, view.feature_level) > self._newest:
            self._newest, self._held = (view.version, view.feature_level), view
            self._member_count = len(view.sss)
        self._send_view()

    def _send_view(self) -> None:
        """Send the newest view to the broker, once its run is registered.

        An unregistered run would connect to the master. The master identifies replicas by their
        own messages, so it would confuse that run with the registered one.
        """
        if self._is_registered and self._held is not None:
            self._actions.append(ToBroker(wire.SessionDown(view=self._held)))
            self._held = None

    def _send_heartbeats(self, now_ms: int) -> None:
        for controller, stream in self._streams.items():
            if stream.is_welcomed:
                self._send_heartbeat(controller, now_ms)

    def _send_heartbeat(self, controller: int, now_ms: int) -> None:
        """Send the last state of the broker with its age."""
        if self._beat is None:
            return
        beat = wire.Heartbeat()
        beat.CopyFrom(self._beat)
        beat.page_age_ms += now_ms - self._beat_at_ms
        self._streams[controller].beat_at_ms = now_ms
        self._send(controller, wire.SessionUp(heartbeat=beat))

    def _send(self, controller: int, up: wire.SessionUp) -> int:
        self._numbers += 1
        sent = wire.SessionUp()
        sent.CopyFrom(up)
        sent.number = self._numbers
        self._actions.append(ToController(controller, sent))
        return self._numbers


def _has_changed(before: wire.Heartbeat, after: wire.Heartbeat) -> bool:
    """Return whether a heartbeat has a change that controllers need at once."""
    return (
        before.is_master,
        before.epoch_seen,
        before.version_seen,
        before.health,
        before.writable_epoch,
    ) != (after.is_master, after.epoch_seen, after.version_seen, after.health, after.writable_epoch)
