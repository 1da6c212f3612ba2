"""Messages of a replica's supervisor to the controllers, and their repetition."""

from __future__ import annotations

from tidemill.broker.controller_link.sessions import (
    HEARTBEAT_MS,
    REQUEST_AGAIN_MS,
    ControllerSessions,
    StopBroker,
    ToBroker,
    ToController,
)
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication

ME = replication.ReplicaRun(replica_id=1, incarnation="b" * 32)


class World:
    """Sessions with their actions, by receiver."""

    def __init__(self, controllers: int = 2) -> None:
        self.sessions = ControllerSessions("broker-0")
        self.now_ms = 0
        self.to_broker: list[wire.SessionDown] = []
        self.ends: list[str] = []
        for controller in range(controllers):
            self.sessions.note_connection(controller)

    def take(self) -> list[tuple[int, wire.SessionUp]]:
        """Return the new messages to controllers."""
        sent = []
        for action in self.sessions.take_actions():
            match action:
                case ToController(controller, message):
                    sent.append((controller, message))
                case ToBroker(message):
                    self.to_broker.append(message)
                case StopBroker(why):
                    self.ends.append(why)
        return sent

    def kinds(self) -> list[tuple[int, str | None]]:
        return [(controller, up.WhichOneof("message")) for controller, up in self.take()]

    def say(self, up: wire.SessionUp) -> None:
        self.sessions.receive_from_broker(up, self.now_ms)

    def hear(self, controller: int, down: wire.SessionDown) -> None:
        self.sessions.receive_from_controller(controller, down, self.now_ms)

    def welcome(self, controller: int, registered: str = "a", *, leads: bool = False) -> None:
        welcome = wire.Welcome(registered_incarnation=registered * 32, is_leading=leads)
        self.hear(controller, wire.SessionDown(welcome=welcome))

    def pass_ms(self, ms: int) -> None:
        self.now_ms += ms
        self.sessions.tick(self.now_ms)

    def registered(self) -> None:
        """Register this run."""
        self.say(wire.SessionUp(register=wire.Register(member=ME, store_uuid="s")))
        self.welcome(0, leads=True)
        self.welcome(1)
        [number] = [up.number for _, up in self.take() if up.WhichOneof("message") == "register"]
        self.answer(0, number, "done")
        self.take()

    def answer(self, controller: int, number: int, result: str) -> None:
        answer = wire.Answer(number=number)
        if result == "done":
            answer.done.SetInParent()
        else:
            setattr(answer, result, "why")
        self.hear(controller, wire.SessionDown(answer=answer))


def beat(*, is_master: bool = False) -> wire.SessionUp:
    return wire.SessionUp(heartbeat=wire.Heartbeat(member=ME, is_master=is_master))


def test_a_replica_attaches_to_all_controllers_and_registers_once() -> None:
    world = World()
    assert world.kinds() == []  # The broker has not registered.
    world.say(wire.SessionUp(register=wire.Register(member=ME)))
    assert world.kinds() == [(0, "attach"), (1, "attach")]
    world.welcome(1)
    [(controller, up)] = world.take()
    assert (controller, up.register.instead_of) == (1, "a" * 32)
    world.welcome(0, leads=True)
    assert world.kinds() == []
    world.answer(1, up.number, "done")
    world.pass_ms(REQUEST_AGAIN_MS)
    assert world.kinds() == [], "once is enough"


def test_an_unanswered_registration_goes_to_another_controller() -> None:
    world = World()
    world.say(wire.SessionUp(register=wire.Register(member=ME)))
    world.welcome(0)
    world.welcome(1)
    first = [c for c, up in world.take() if up.WhichOneof("message") == "register"]
    world.pass_ms(REQUEST_AGAIN_MS)
    second = [c for c, up in world.take() if up.WhichOneof("message") == "register"]
    assert sorted(first + second) == [0, 1]


def test_a_registration_on_a_closed_stream_goes_to_another_controller_at_once() -> None:
    world = World()
    world.say(wire.SessionUp(register=wire.Register(member=ME)))
    world.welcome(0)
    world.welcome(1)
    world.take()
    world.sessions.note_disconnection(0)
    world.pass_ms(1)
    assert (1, "register") in world.kinds()


def test_heartbeats_go_to_all_controllers_with_the_age_of_the_state() -> None:
    world = World()
    world.registered()
    world.say(beat())
    assert world.kinds() == [(0, "heartbeat"), (1, "heartbeat")]
    world.pass_ms(HEARTBEAT_MS)
    ages = [up.heartbeat.page_age_ms for _, up in world.take()]
    assert ages == [HEARTBEAT_MS, HEARTBEAT_MS]
    world.say(beat(is_master=True))  # A change is sent at once.
    assert world.kinds() == [(0, "heartbeat"), (1, "heartbeat")]
    world.say(beat(is_master=True))
    assert world.kinds() == []


def test_a_death_goes_to_all_controllers_and_to_later_connections() -> None:
    world = World()
    world.registered()
    world.sessions.note_broker_end("killed")
    assert world.kinds() == [(0, "death"), (1, "death")]
    world.sessions.note_disconnection(0)
    world.sessions.note_connection(0)
    sent = world.take()
    assert [up.WhichOneof("message") for _, up in sent] == ["attach", "death"]
    assert sent[1][1].death.member == ME


def test_the_next_run_registers_in_place_of_the_last() -> None:
    world = World()
    world.registered()
    world.sessions.note_broker_end("killed")
    world.take()
    again = replication.ReplicaRun(replica_id=1, incarnation="c" * 32)
    world.say(wire.SessionUp(register=wire.Register(member=again)))
    world.welcome(0, "b")
    registers = [up.register for _, up in world.take() if up.WhichOneof("message") == "register"]
    assert [(one.member, one.instead_of) for one in registers] == [(again, "b" * 32)]


def test_a_broker_that_emptied_its_store_registers_as_another_run() -> None:
    """The late answer to the first registration belongs to another run."""
    world = World()
    world.say(wire.SessionUp(register=wire.Register(member=ME, store_uuid="s", is_clean=True)))
    world.welcome(0)
    [late] = [up.number for _, up in world.take() if up.WhichOneof("message") == "register"]
    again = replication.ReplicaRun(replica_id=1, incarnation="c" * 32)
    world.say(wire.SessionUp(register=wire.Register(member=again)))
    world.answer(0, late, "done")
    world.welcome(0, "b")
    registers = [up.register for _, up in world.take() if up.WhichOneof("message") == "register"]
    assert [(one.member, one.instead_of) for one in registers] == [(again, "b" * 32)]


def test_a_master_has_a_successor_only_in_the_sync_state_set() -> None:
    """Otherwise its stop would wait in vain for a transfer."""
    world = World()
    world.registered()
    runs = [replication.ReplicaRun(replica_id=n, incarnation="d" * 32) for n in (0, 2)]
    for version, others in enumerate(([], runs[:1], runs, [])):
        view = replication.ReplicationView(epoch=1, version=version, sss=[ME, *others])
        world.hear(0, wire.SessionDown(view=view))
        assert world.sessions.has_successor is bool(others)
    world.hear(0, wire.SessionDown(view=replication.ReplicationView(version=9, sss=[ME, *runs])))
    for controller in range(2):
        assert world.sessions.has_successor
        world.sessions.note_disconnection(controller)
    assert not world.sessions.has_successor


def test_the_broker_gets_a_view_once_from_several_controllers() -> None:
    world = World()
    world.registered()
    view = replication.ReplicationView(epoch=1, version=4)
    world.hear(0, wire.SessionDown(view=view))
    world.hear(1, wire.SessionDown(view=view))
    world.hear(1, wire.SessionDown(view=replication.ReplicationView(epoch=1, version=3)))
    world.take()
    assert [down.view.version for down in world.to_broker] == [4]


def test_a_proposal_goes_to_the_leader_and_its_answer_has_the_broker_number() -> None:
    world = World()
    world.registered()
    world.say(wire.SessionUp(number=77, proposal=wire.Proposal(epoch=1, version=4)))
    [(controller, up)] = world.take()
    assert controller == 0
    # Without an answer, the repeated proposal goes to the other controller.
    world.say(wire.SessionUp(number=78, proposal=wire.Proposal(epoch=1, version=4)))
    [(second, _)] = world.take()
    assert second == 1
    world.answer(0, up.number, "refused")
    world.take()
    assert [(d.answer.number, d.answer.refused) for d in world.to_broker] == [(77, "why")]


def test_a_fenced_run_ends() -> None:
    world = World()
    world.registered()
    world.answer(1, 999, "fenced")
    world.take()
    assert world.ends == ["why"]


def test_a_supervisor_without_controllers_waits_and_registers_later() -> None:
    world = World(controllers=0)
    world.say(wire.SessionUp(register=wire.Register(member=ME)))
    world.say(beat())
    world.say(wire.SessionUp(number=1, proposal=wire.Proposal(epoch=1)))
    world.pass_ms(10_000)
    assert world.kinds() == []
    world.sessions.note_connection(0)
    assert world.kinds() == [(0, "attach")]
    world.welcome(0)
    assert world.kinds() == [(0, "register"), (0, "heartbeat")]


def view(version: int) -> wire.SessionDown:
    return wire.SessionDown(view=replication.ReplicationView(epoch=3, version=version))


def test_a_broker_gets_views_only_after_its_registration() -> None:
    """An unregistered run would connect to the master as if it were the registered one."""
    world = World()
    world.say(wire.SessionUp(register=wire.Register(member=ME)))
    world.welcome(0, leads=True)
    [number] = [up.number for _, up in world.take() if up.WhichOneof("message") == "register"]
    world.hear(0, view(7))
    world.hear(0, view(8))
    world.take()
    assert not world.to_broker
    world.answer(0, number, "refused")
    world.take()
    assert not world.to_broker
    world.pass_ms(REQUEST_AGAIN_MS)
    [number] = [up.number for _, up in world.take() if up.WhichOneof("message") == "register"]
    world.answer(0, number, "done")
    world.take()
    assert [each.view.version for each in world.to_broker] == [8]
    world.hear(0, view(8))
    world.hear(0, view(9))
    world.take()
    assert [each.view.version for each in world.to_broker] == [8, 9]


def test_a_replica_registers_again_after_a_loss_of_records() -> None:
    world = World(controllers=1)
    world.say(wire.SessionUp(register=wire.Register(member=ME)))
    world.welcome(0)
    [number] = [up.number for _, up in world.take() if up.WhichOneof("message") == "register"]
    world.answer(0, number, "done")
    world.sessions.note_disconnection(0)
    world.sessions.note_connection(0)
    world.take()
    world.hear(0, wire.SessionDown(welcome=wire.Welcome(registered_incarnation="")))
    assert [kind for _, kind in world.kinds()] == ["register"]


def test_a_broker_gets_a_version_again_with_the_level_that_an_old_controller_left_out() -> None:
    world = World()
    world.registered()
    for controller, level in ((0, 0), (1, 2), (0, 0), (1, 2)):
        view = replication.ReplicationView(version=9, feature_level=level)
        world.hear(controller, wire.SessionDown(view=view))
    world.take()
    views = [down.view for down in world.to_broker if down.HasField("view")]
    assert [(one.version, one.feature_level) for one in views] == [(9, 0), (9, 2)]
