"""The clients' calls for one subscription, and the verdict on them.

One history covers one consumer group on one topic. The test records every send, receive and ack as
it happens. Afterwards `judge` compares the history with the delivery guarantees. A history needs no
clock: the order of the records is the order of the events. The test records both the begin and the
end of a send or an ack. So the verdict is right even if a message arrives before the answer to its
send, or if the broker applies an ack before its answer arrives.

Call `judge` when the subscription is quiescent: all messages are received and acked, and the
consumer group has received nothing for longer than an invisible duration.
"""

from __future__ import annotations

import enum
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

SHOWN_MAX = 10  # findings of each kind in the text of a verdict


class Outcome(enum.Enum):
    """The outcome of a call, as its caller knows it."""

    OK = "ok"
    UNKNOWN = "unknown"  # no answer: the server may apply it, now or later
    FAILED = "failed"  # rejected: the server did not apply it


@dataclass(slots=True, kw_only=True)
class Send:
    """One attempt to send a message. A retry is another message with another key."""

    key: str
    message_group: str
    begun_at: int
    outcome: Outcome = Outcome.UNKNOWN

    def ended(self, outcome: Outcome) -> None:
        """Record the outcome of the send."""
        self.outcome = outcome


@dataclass(slots=True, kw_only=True)
class Ack:
    """One ack of a delivery."""

    key: str
    attempt: int
    begun_at: int
    clock: Iterator[int]
    place: str = ""  # the same as in `Receive`
    outcome: Outcome = Outcome.UNKNOWN
    ended_at: int | None = None

    def ended(self, outcome: Outcome) -> None:
        """Record the outcome of the ack."""
        self.outcome = outcome
        self.ended_at = next(self.clock)


class Receive(NamedTuple):
    """One message in the answer to a receive."""

    key: str
    received_at: int  # the same for all messages of one answer
    position: int  # in that answer
    attempt: int  # delivery attempt of the message; 0: unknown
    # Broker group of the message: both groups may store a send that was moved.
    place: str = ""
    called_at: int = 0  # the begin of the receive; 0: unknown


class Verdict(NamedTuple):
    """Violations in a history, as sentences. Empty lists mean a clean history."""

    lost: Sequence[str]
    duplicated: Sequence[str]
    unexpected: Sequence[str]
    out_of_order: Sequence[str]

    @property
    def is_clean(self) -> bool:
        """Whether the history has no violation."""
        return not any(self)

    def __str__(self) -> str:
        lines = []
        for name, findings in self._asdict().items():
            lines.append(f"{name}: {len(findings)}")
            lines += [f"  {finding}" for finding in findings[:SHOWN_MAX]]
        return "\n".join(lines)


@dataclass(slots=True)
class History:
    """All recorded calls of one subscription."""

    sends: dict[str, Send] = field(default_factory=dict)
    receives: list[Receive] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    _order_given_up_at: list[int] = field(default_factory=list)
    # By message, the times in order:
    _removals: dict[str, list[int]] = field(default_factory=dict)
    _replays: dict[str, list[int]] = field(default_factory=dict)
    _due_again_at: dict[str, int] = field(default_factory=dict)  # the last replay that succeeded
    _purged_at: dict[tuple[str, str], int] = field(default_factory=dict)  # by key and broker group
    _clock: Iterator[int] = field(default_factory=count)

    def send(self, key: str, *, message_group: str = "") -> Send:
        """Record the begin of a send. The message's body contains `key`.

        The test sends the messages of a message group one after the other.
        """
        assert key not in self.sends, f"{key} is sent twice: the key must name one try"
        send = Send(key=key, message_group=message_group, begun_at=next(self._clock))
        self.sends[key] = send
        return send

    def received(
        self,
        keys: Sequence[str],
        attempts: Sequence[int] = (),
        places: Sequence[str] = (),
        *,
        called_at: int = 0,
    ) -> None:
        """Record the messages of one answer in order, with their attempts and broker groups.

        `called_at` is the result of `now` before the receive.
        """
        now = next(self._clock)
        attempts = attempts or [0] * len(keys)
        places = places or [""] * len(keys)
        self.receives += [
            Receive(key, now, position, attempt, place, called_at)
            for position, (key, attempt, place) in enumerate(
                zip(keys, attempts, places, strict=True)
            )
        ]

    def ack(self, key: str, attempt: int = 0, place: str = "") -> Ack:
        """Record the begin of an ack."""
        ack = Ack(
            key=key, attempt=attempt, begun_at=next(self._clock), clock=self._clock, place=place
        )
        self.acks.append(ack)
        return ack

    def give_up_order(self) -> None:
        """Record that earlier messages may now come after later ones."""
        self._order_given_up_at.append(next(self._clock))

    def now(self) -> int:
        """Return a time between the records before and after this call."""
        return next(self._clock)

    def remove(self, keys: Iterable[str]) -> None:
        """Record that retention or a purge removes messages now: they need not come any more.

        A power cut may undo a removal. The messages may then still come.
        """
        _note(self._removals, self.sends.keys() & keys, self.now())

    def replay(self, keys: Iterable[str]) -> int:
        """Record that an operator sets the group back: settled messages may come again.

        Returns the time of the replay, for `expect_again`.
        """
        now = self.now()
        _note(self._replays, self.sends.keys() & keys, now)
        return now

    def expect_again(self, keys: Iterable[str], replayed_at: int) -> None:
        """Record the OK of a replay: all its messages must be delivered again."""
        self._due_again_at |= dict.fromkeys(self.sends.keys() & keys, replayed_at)

    def expect_no_more(self, keys: Iterable[str], place: str) -> None:
        """Record the OK of a purge at a broker group: later receives return none of these."""
        now = self.now()
        self._purged_at |= {(key, place): now for key in self.sends.keys() & keys}

    def unsettled(self) -> set[str]:
        """Return the stored messages without an ack. A drain waits for them."""
        settled_at = {
            ack.key: ack.begun_at for ack in self.acks if ack.outcome is not Outcome.FAILED
        }
        settled_at |= {
            key: max(times[-1], settled_at.get(key, 0)) for key, times in self._removals.items()
        }
        # Acks and removals before a replay do not count.
        return {
            key
            for key, send in self.sends.items()
            if send.outcome is Outcome.OK
            and (key not in settled_at or settled_at[key] < self._due_again_at.get(key, 0))
        }

    def describe_unsettled(self) -> str:
        """Return the records of the first unsettled messages, one per line."""
        noted: list[Receive | Ack | Send] = [*self.receives, *self.acks, *self.sends.values()]
        return "\n".join(
            str(one)
            for key in sorted(self.unsettled())[:SHOWN_MAX]
            for one in noted
            if one.key == key
        )

    def judge(self) -> Verdict:
        """Compare the history with the delivery guarantees."""
        return Verdict(
            lost=self._lost(),
            duplicated=self._duplicated(),
            unexpected=self._unexpected(),
            out_of_order=self._out_of_order(),
        )

    def _lost(self) -> list[str]:
        received = {receive.key for receive in self.receives}
        return [
            f"{key} was stored and {'never acked' if key in received else 'never received'}"
            for key in sorted(self.unsettled())
        ]

    def _duplicated(self) -> list[str]:
        acked: dict[tuple[str, str, int], Ack] = {}
        for ack in self.acks:
            if ack.outcome is Outcome.OK and ack.ended_at is not None:
                # The broker rejects acks of deliveries from before a replay.
                acked.setdefault((ack.key, ack.place, self._replays_at(ack.key, ack.begun_at)), ack)
        return [
            f"{one.key} came again after its ack was answered with OK"
            for one in self.receives
            if (place := (one.key, one.place, self._replays_at(one.key, one.received_at))) in acked
            and _is_again(one, acked[place])
        ]

    def _replays_at(self, key: str, at: int) -> int:
        """Return how often a message was replayed before a time."""
        return bisect(self._replays.get(key, ()), at)

    def _unexpected(self) -> list[str]:
        findings = []
        for one in self.receives:
            key, received_at = one.key, one.received_at
            send = self.sends.get(key)
            if send is None or send.begun_at > received_at:
                findings.append(f"{key} was never sent")
            elif send.outcome is Outcome.FAILED:
                findings.append(f"{key} came although its send was refused")
            purged_at = self._purged_at.get((key, one.place), one.called_at)
            if purged_at < one.called_at and self._replays_at(key, purged_at) == self._replays_at(
                key, received_at
            ):
                findings.append(f"{key} came after it was purged")
        return findings

    def _out_of_order(self) -> list[str]:
        """Find messages that overtook an earlier message of their message group.

        All earlier messages must be settled, or come before it in the same answer. The server may
        apply a send of unknown outcome late, so other messages need not wait for it.
        """
        waiting: dict[str, list[Send]] = defaultdict(list)
        for send in reversed(self.sends.values()):
            if send.message_group and send.outcome is Outcome.OK:
                waiting[send.message_group].append(send)
        settled_at = self._settled_at()
        position = {(key, at): position for key, at, position, *_ in reversed(self.receives)}
        findings = []
        for key, received_at, position_here, *_ in self.receives:
            if (this := self.sends.get(key)) is None:
                continue
            earlier_sends = waiting[this.message_group]
            # A message that was settled before this receive was settled before later receives.
            while (
                earlier_sends and settled_at.get(earlier_sends[-1].key, received_at) < received_at
            ):
                earlier_sends.pop()
            for earlier in reversed(earlier_sends):
                if earlier.begun_at >= this.begun_at:
                    break
                is_settled = settled_at.get(earlier.key, received_at) < received_at
                if any(earlier.begun_at < at < received_at for at in self._order_given_up_at):
                    continue
                if not is_settled and (
                    position.get((earlier.key, received_at), position_here) >= position_here
                ):
                    findings.append(f"{key} came before {earlier.key}, which was sent earlier")
                    break
        return findings

    def _settled_at(self) -> dict[str, int]:
        """Return the earliest time at which each message may count as settled.

        The broker applies an ack after its begin. If the message came again without a replay, the
        broker did not apply an ack without an answer. A removed message delays no other.
        """
        replays_at = self._replays_at
        last_received_at = {
            (key, replays_at(key, received_at)): received_at
            for key, received_at, *_ in self.receives
        }
        settled_at: dict[str, int] = {}
        for ack in self.acks:
            key, begun_at = ack.key, ack.begun_at
            is_applied = ack.outcome is Outcome.OK or (
                ack.outcome is Outcome.UNKNOWN
                and last_received_at.get((key, replays_at(key, begun_at)), 0) < begun_at
            )
            if is_applied:
                settled_at.setdefault(key, begun_at)
        for key, times in self._removals.items():
            settled_at[key] = min(settled_at.get(key, times[0]), times[0])
        return settled_at


def _note(times: dict[str, list[int]], keys: Iterable[str], now: int) -> None:
    for key in keys:
        times.setdefault(key, []).append(now)


def _is_again(received: Receive, ack: Ack) -> bool:
    """Return whether a settled message came again, in the same or a later delivery attempt.

    An earlier delivery may have been in flight for longer than its invisible duration.
    """
    assert ack.ended_at is not None, "the ack was answered"
    return received.received_at > ack.ended_at and received.attempt >= ack.attempt
