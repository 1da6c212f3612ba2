"""All pairs of state and event of a link: the real link follows its table."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.support.worlds.round_world import Proxy, RoundWorld
from tidemill.broker.server.link.link_states import TRANSITIONS, ProxyLinkEvent, ProxyLinkState
from tidemill.broker.server.link.proxy_link import ProxyLink
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

PROCESS = b"one proxy"
# The shortest way to each state.
PATHS: dict[ProxyLinkState, tuple[ProxyLinkEvent, ...]] = {
    ProxyLinkState.OPENED: (),
    ProxyLinkState.SERVED: (ProxyLinkEvent.GREET,),
    ProxyLinkState.CLOSED: (ProxyLinkEvent.END,),
    ProxyLinkState.REMOVED: (ProxyLinkEvent.END, ProxyLinkEvent.REMOVE),
}
PAIRS = list(itertools.product(ProxyLinkState, ProxyLinkEvent))


class LinkWorld:
    """A link outside of rounds, which are begun and never committed."""

    def __init__(self) -> None:
        world = RoundWorld()
        self.rounds = world.rounds
        self.newest: dict[bytes, ProxyLink] = {}
        self.proxy = Proxy(self.rounds, self.newest)
        self.link = self.proxy.link
        self._events: dict[ProxyLinkEvent, Callable[[], None]] = {
            ProxyLinkEvent.GREET: lambda: self.link.greet(self.rounds.turn),
            ProxyLinkEvent.REPLACE: self._replace,
            ProxyLinkEvent.REFUSE: lambda: self.link.refuse(self.rounds.turn),
            ProxyLinkEvent.END: self.link.end,
            ProxyLinkEvent.REMOVE: lambda: self.link.remove(self.rounds.turn),
        }

    @property
    def state(self) -> ProxyLinkState:
        return self.link._state

    def apply(self, *events: ProxyLinkEvent) -> None:
        for event in events:
            self._events[event]()

    def introduce(self, process_id: bytes) -> None:
        """Let the link name the process that opened its stream."""
        frame = pb.RequestFrame(process_id=process_id, stream_number=1)
        assert not list(self.link.apply(frame, 0.0, self.rounds.turn))

    def _replace(self) -> None:
        """Introduce a newer stream of the same process."""
        self.newest[PROCESS] = self.link
        newer = Proxy(self.rounds, self.newest).link
        introduction = pb.RequestFrame(process_id=PROCESS, stream_number=1)
        assert not list(newer.apply(introduction, 0.0, self.rounds.turn))


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_link_follows_its_table(state: ProxyLinkState, event: ProxyLinkEvent) -> None:
    world = LinkWorld()
    world.apply(*PATHS[state])
    assert world.state is state
    following = TRANSITIONS.get((state, event))
    if following is None:
        with pytest.raises(AssertionError, match="cannot"):
            world.apply(event)
    else:
        world.apply(event)
        assert world.state is following


@pytest.mark.parametrize("state", ProxyLinkState)
def test_only_a_served_link_applies_requests(state: ProxyLinkState) -> None:
    world = LinkWorld()
    world.apply(*PATHS[state])
    frame = pb.RequestFrame(sequence=1, ensures=[pb.EnsureRequest(request_id=1, topic="new")])
    for _ in world.link.apply(frame, 0.0, world.rounds.turn):
        pass
    is_applied = world.rounds.engine.catalog.find_topic("new") is not None
    assert is_applied is (state is ProxyLinkState.SERVED)


def test_an_end_before_the_greeting_sends_no_configuration() -> None:
    world = LinkWorld()
    world.apply(ProxyLinkEvent.END, ProxyLinkEvent.GREET, ProxyLinkEvent.REMOVE)
    assert world.link not in world.rounds.turn.effects


def test_a_removed_link_that_named_two_processes_is_forgotten() -> None:
    world = LinkWorld()
    world.apply(ProxyLinkEvent.GREET)
    for process_id in (PROCESS, b"another proxy"):
        world.introduce(process_id)
    world.apply(ProxyLinkEvent.END, ProxyLinkEvent.REMOVE)
    assert not world.newest
