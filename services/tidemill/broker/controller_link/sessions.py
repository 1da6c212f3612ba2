"""Whom a replica's supervisor tells what: decisions without I/O and time.

    broker_said(up)         Register, Heartbeat, Proposal, Release, as the broker's port sends them
    broker_ended(how)       its process has ended
    connected(i), lost(i)   the stream to a controller
    heard(i, down)          what a controller says
    tick()                  at least every HEARTBEAT_MS
    take_actions()          after each of them

Any controller takes any request, and the record decides: so one that does not answer is not waited
for, and what is asked again goes to the next. While no controller is there nothing happens here,
and the broker goes on with the view that it has (F-18).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, final

from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication

HEARTBEAT_MS: Final = 200  # a fifth of the time after which a replica counts as gone
REQUEST_AGAIN_MS: Final = 1_000  # as long as a controller waits for its store
WAITING_MAX: Final = 16  # requests of the broker, of which it has one proposal and one release


class ToController(NamedTuple):
    """Send this on the stream to a controller."""

    controller: int
    message: wire.SessionUp


class ToBroker(NamedTuple):
    """Send this to the broker."""

    message: wire.SessionDown


class StopBroker(NamedTuple):
    """The broker is to end: another run of this replica has registered."""

    why: str


Action: TypeAlias = ToController | ToBroker | StopBroker


@dataclass(slots=True)
class _Stream:
    """A stream that is open."""

    is_welcomed: bool = False
    is_leading: bool = False
    registered: str = ""  # the incarnation that the record had when we attached
    told_at_ms: int = 0  # of the last heartbeat
    has_heard_of_death: bool = False  # of the last run


class _Asked(NamedTuple):
    """A request on its way."""

    controller: int
    at_ms: int
    number: int  # the broker's own; 0: it is our registration


@final
class ControllerSessions:
    """The sessions of one replica with all controllers."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._streams: dict[int, _Stream] = {}
        self._register: wire.Register | None = None
        self._is_registered = False
        self._beat: wire.Heartbeat | None = None
        self._beat_at_ms = 0  # when the broker has said so: its age goes with it
        self._version = -1  # of the newest view
        self._held: replication.GroupView | None = None  # which the broker was not told yet
        self._death: wire.DeathCertificate | None = None
        self._numbers = 0
        self._asked: dict[int, _Asked] = {}  # by our number
        self._turn = -1  # who was asked last, where none is known to lead
        self._actions: list[Action] = []

    @property
    def has_controller(self) -> bool:
        """Whether anybody is there who could let another replica be master."""
        return any(stream.is_welcomed for stream in self._streams.values())

    def take_actions(self) -> list[Action]:
        """Return and clear what is to be done, in its order."""
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------ the broker

    def broker_said(self, up: wire.SessionUp, now_ms: int) -> None:
        """Hear the broker."""
        match up.WhichOneof("message"):
            case "register":
                # Also of a broker that goes on as another run, with an empty store.
                self._register, self._beat, self._is_registered = up.register, None, False
                self._asked = {n: one for n, one in self._asked.items() if one.number}
                for controller, stream in self._streams.items():
                    stream.is_welcomed = False
                    self._attach(controller)
            case "heartbeat":
                is_change = self._beat is None or _has_changed(self._beat, up.heartbeat)
                self._beat, self._beat_at_ms = up.heartbeat, now_ms
                if is_change:
                    self._tell_all(now_ms)
            case "proposal" | "release":
                self._ask(up, now_ms)
            case _:
                pass  # Of another build of ours: it knows more than we do.

    def broker_ended(self, how: str) -> None:
        """Hear that the broker's process has ended: everybody is told at once (D1)."""
        if self._register is None:
            return
        self._death = wire.DeathCertificate(member=self._register.member, how=how)
        self._register, self._beat, self._is_registered = None, None, False
        self._version, self._held = -1, None
        self._asked.clear()
        for controller, stream in self._streams.items():
            stream.has_heard_of_death = True
            self._send(controller, wire.SessionUp(death=self._death))

    # ------------------------------------------------------------ the controllers

    def connected(self, controller: int) -> None:
        """Hear that there is a stream to a controller."""
        self._streams[controller] = _Stream()
        self._attach(controller)

    def lost(self, controller: int) -> None:
        """Hear that a stream has ended; what was asked on it is asked again elsewhere."""
        self._streams.pop(controller, None)
        for number in [n for n, asked in self._asked.items() if asked.controller == controller]:
            del self._asked[number]

    def heard(self, controller: int, down: wire.SessionDown, now_ms: int) -> None:
        """Hear a controller."""
        stream = self._streams.get(controller)
        if stream is None:
            return
        match down.WhichOneof("message"):
            case "welcome":
                self._welcomed(stream, down.welcome)
                self._go_on(now_ms)
                self._tell(controller, now_ms)
            case "view":
                self._learn(down.view)
            case "beat":
                stream.is_leading = down.beat.is_leading
                self._actions.append(ToBroker(down))
            case "hand_over":
                self._actions.append(ToBroker(down))
            case "answer":
                self._answered(down.answer, now_ms)
            case _:
                pass  # A newer controller's: we do without.

    def tick(self, now_ms: int) -> None:
        """Do what time brings."""
        late = [n for n, one in self._asked.items() if now_ms - one.at_ms >= REQUEST_AGAIN_MS]
        for number in late:
            # Until it says so again: who leads and does not answer is not asked for ever.
            self._streams[self._asked.pop(number).controller].is_leading = False
        self._go_on(now_ms)
        for controller, stream in self._streams.items():
            if stream.is_welcomed and now_ms - stream.told_at_ms >= HEARTBEAT_MS:
                self._tell(controller, now_ms)

    # ------------------------------------------------------------ inside

    def _attach(self, controller: int) -> None:
        said = self._register or self._death
        if said is not None:
            epoch_seen = 0 if self._beat is None else self._beat.epoch_seen
            attach = wire.Attach(group=self._group, member=said.member, epoch_seen=epoch_seen)
            self._send(controller, wire.SessionUp(attach=attach))
        if self._death is not None and not self._streams[controller].has_heard_of_death:
            self._streams[controller].has_heard_of_death = True
            # It may have been away when the run before this one has ended.
            self._send(controller, wire.SessionUp(death=self._death))

    def _welcomed(self, stream: _Stream, welcome: wire.Welcome) -> None:
        stream.is_welcomed, stream.is_leading = True, welcome.is_leading
        stream.registered = welcome.registered_incarnation
        register = self._register
        if register is not None:
            # Where it was and is not any more, the records were lost, or restored: it comes again.
            self._is_registered = stream.registered == register.member.incarnation
            self._tell_view()

    def _go_on(self, now_ms: int) -> None:
        """Register, unless that is done, or under way."""
        if self._register is None or self._is_registered:
            return
        if any(asked.number == 0 for asked in self._asked.values()):
            return
        controller = self._next()
        if controller is None:
            return
        register = wire.Register()
        register.CopyFrom(self._register)
        register.instead_of = self._streams[controller].registered
        number = self._send(controller, wire.SessionUp(register=register))
        self._asked[number] = _Asked(controller, now_ms, 0)

    def _ask(self, up: wire.SessionUp, now_ms: int) -> None:
        """Ask one controller: a master says it again as long as nothing comes of it."""
        controller = self._next()
        if controller is None or len(self._asked) >= WAITING_MAX:
            return
        said = up.number
        number = self._send(controller, up)
        self._asked[number] = _Asked(controller, now_ms, said)

    def _next(self) -> int | None:
        """Return whom to ask: the one that leads, unless it has yet to answer."""
        welcomed = sorted(n for n, stream in self._streams.items() if stream.is_welcomed)
        busy = {asked.controller for asked in self._asked.values()}
        free = [n for n in welcomed if n not in busy] or welcomed
        leading = [n for n in free if self._streams[n].is_leading and n not in busy]
        if leading:
            return leading[0]
        if not free:
            return None
        # Each in its turn.
        self._turn = next((n for n in free if n > self._turn), free[0])
        return self._turn

    def _answered(self, answer: wire.Answer, now_ms: int) -> None:
        asked = self._asked.pop(answer.number, None)
        result = answer.WhichOneof("result")
        if result == "fenced":
            self._actions.append(StopBroker(answer.fenced))
        elif asked is None:
            return
        elif asked.number:
            answer.number = asked.number
            self._actions.append(ToBroker(wire.SessionDown(answer=answer)))
        elif result == "done":
            self._is_registered = True
            self._tell_view()
        elif result in ("unavailable", "refused"):
            # It is asked again when this one counts as late: at once, it would be asked for ever.
            # Who refuses a registration waits for another run of the replica.
            self._asked[answer.number] = _Asked(asked.controller, now_ms, 0)

    def _learn(self, view: replication.GroupView) -> None:
        if view.version > self._version:
            self._version, self._held = view.version, view
        self._tell_view()

    def _tell_view(self) -> None:
        """Tell the broker what is decided, from when on it is one of those that it concerns.

        A run that is not registered would dial the master, and take the place there of the one that
        is: a master knows replicas by what they say.
        """
        if self._is_registered and self._held is not None:
            self._actions.append(ToBroker(wire.SessionDown(view=self._held)))
            self._held = None

    def _tell_all(self, now_ms: int) -> None:
        for controller, stream in self._streams.items():
            if stream.is_welcomed:
                self._tell(controller, now_ms)

    def _tell(self, controller: int, now_ms: int) -> None:
        """Say how the broker is, and how long ago it has said so."""
        if self._beat is None:
            return
        beat = wire.Heartbeat()
        beat.CopyFrom(self._beat)
        beat.page_age_ms += now_ms - self._beat_at_ms
        self._streams[controller].told_at_ms = now_ms
        self._send(controller, wire.SessionUp(heartbeat=beat))

    def _send(self, controller: int, up: wire.SessionUp) -> int:
        self._numbers += 1
        sent = wire.SessionUp()
        sent.CopyFrom(up)
        sent.number = self._numbers
        self._actions.append(ToController(controller, sent))
        return self._numbers


def _has_changed(before: wire.Heartbeat, after: wire.Heartbeat) -> bool:
    """Whether a heartbeat says what is not to wait for its turn."""
    return (
        before.is_master,
        before.epoch_seen,
        before.version_seen,
        before.health,
        before.writable_epoch,
    ) != (after.is_master, after.epoch_seen, after.version_seen, after.health, after.writable_epoch)
