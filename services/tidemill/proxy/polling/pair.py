"""The polls of one group on one topic with one filter: who waits, and which broker they watch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final

from tidemill.proxy.polling.mode import Mode
from tidemill.proxy.polling.notifications import AskAction, Watch
from tidemill.proxy.polling.poll import Broker, Poll, State

# How long notifications outlive the polls that wanted them: a consumer that has worked on what it
# got polls again, and finds them parked.
LINGER_MS: Final = 1_000
# Polls of a pair that are parked at one broker; the others wait for hints. More would cover it no
# better, and of all proxies it takes 1,024.
PARKED_A_BROKER_MAX: Final = 16
_STALE_MIN: Final = 64  # entries of polls that do not wait any more before they are swept


class Key(NamedTuple):
    """What polls have in common that wait for the same messages."""

    topic: str
    group: str
    tags: frozenset[str]


@final
class Pair:
    """Who waits for the same messages.

    Either somebody waits for hints and every broker is watched, or all polls are parked and those
    brokers are watched at which none is.
    """

    def __init__(self, key: Key, mode: Mode, *, random: Callable[[], float]) -> None:
        self.key = key
        self.mode = mode
        self.target: object = None  # what the shell knows the group and the topic by
        self.watches: dict[Broker, Watch] = {}
        self.silent: frozenset[Broker] = frozenset()  # of these, as the last poll found them
        self.hinted: dict[Watch, None] = {}  # with hints that nobody was sent for, the oldest first
        self.parked: dict[Poll, None] = {}  # the oldest first
        self.polls: dict[Poll, None] = {}  # that have not ended
        self.waiting: dict[Poll, None] = {}  # of these, for a hint
        # Of these, who would have asked when it began, and found nobody that could be reached.
        self.owed: dict[Poll, None] = {}
        self.until_ms = 0  # by when the last of them has ended
        self.linger_until_ms = 0
        self._random = random
        self._turn = 0
        self._covering: dict[Broker, int] = {}  # how many polls are parked there
        # Those that wait, and some that do not any more; a poll may be in it twice.
        self._by_age: list[tuple[int, Poll]] = []

    # ------------------------------------------------------------ brokers

    def watch(self, brokers: Sequence[Broker], down: set[Broker]) -> list[AskAction]:
        """Know which brokers have messages of the pair."""
        actions: list[AskAction] = []
        if len(brokers) != len(self.watches) or any(name not in self.watches for name in brokers):
            for name in [name for name in self.watches if name not in brokers]:
                gone = self.watches.pop(name)
                self.hinted.pop(gone, None)
                if stopped := gone.stop():
                    actions.append(stopped)
            for name in brokers:
                if name not in self.watches:
                    added = self.watches[name] = Watch(self, name, random=self._random)
                    added.is_down = name in down
        return actions

    def in_turn(self) -> list[Broker]:
        """Return the brokers that can be asked, each time another one first.

        One that is silent is waited for, and no pop is: unless all are.
        """
        up = [name for name, watch in self.watches.items() if not watch.is_down]
        names = [name for name in up if name not in self.silent] or up
        self._turn += 1
        first = self._turn % len(names) if names else 0
        return names[first:] + names[:first]

    def is_covered(self, now_ms: int) -> bool:
        """Whether every broker that can be reached would have told of a message."""
        return all(watch.is_down or watch.is_covered(now_ms) for watch in self.watches.values())

    def wants(self, watch: Watch) -> bool:
        """Whether a message at this broker might wait for nobody."""
        if self.waiting:
            return True
        return bool(self.parked) and not self._covering.get(watch.broker)

    # ------------------------------------------------------------ who waits for hints

    def wait(self, poll: Poll) -> None:
        """Let `poll` wait for a hint."""
        assert poll.state is State.WAITING, "who waits has no pop under way"
        self.waiting[poll] = None
        heapq.heappush(self._by_age, (poll.number, poll))
        if len(self._by_age) > max(2 * len(self.waiting), _STALE_MIN):
            self._by_age = sorted((one.number, one) for one in self.waiting)

    def unwait(self, poll: Poll) -> bool:
        """Know that it does not wait any more; False: it did not."""
        if poll not in self.waiting:
            return False
        del self.waiting[poll]
        self.owed.pop(poll, None)
        return True

    def oldest_waiting(self) -> Poll | None:
        """Return who began first, of those who wait for a hint."""
        by_age = self._by_age
        while by_age and by_age[0][1] not in self.waiting:
            heapq.heappop(by_age)
        return by_age[0][1] if by_age else None

    # ------------------------------------------------------------ who is parked

    def park(self, poll: Poll, broker: Broker) -> None:
        """Know that `poll` is parked at `broker`."""
        self.parked[poll] = None
        self._covering[broker] = self._covering.get(broker, 0) + 1

    def unpark(self, poll: Poll) -> None:
        """Know that it is not parked any more."""
        broker = poll.parked_at
        if broker is None or poll not in self.parked:
            return
        del self.parked[poll]
        self._covering[broker] -= 1
        if not self._covering[broker]:
            del self._covering[broker]

    def to_cover(self, brokers: Sequence[Broker]) -> Broker | None:
        """Return where another poll is parked best, the first of several; None: enough are."""
        covering = self._covering
        best = min(brokers, key=lambda name: covering.get(name, 0), default=None)
        if best is None or covering.get(best, 0) >= PARKED_A_BROKER_MAX:
            return None
        return best

    def to_move(self, count: int) -> list[Poll]:
        """Return up to `count` parked polls that are to follow a hint, which others cover for."""
        moving = [poll for poll in self.parked if poll.is_stopping]
        if len(moving) >= count or not self.parked:
            return []
        for poll in self.parked:
            if not poll.is_stopping and self._covering.get(poll.parked_at or "", 0) > 1:
                return [poll]
        return [poll for poll in self.parked if not poll.is_stopping][:1]
