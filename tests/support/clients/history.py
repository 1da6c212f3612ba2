"""What clients saw of one subscription, and the verdict on it.

One history is the view of one consumer group on one topic. Whoever drives the clients notes every
send, receive and ack as it happens; afterwards `judge` compares what was seen with what is
promised. It needs no clock: the order in which things were noted is the order in which they
happened, and what takes time is noted at its begin and at its end. So a message that arrives while
its send is still unanswered, or an ack that is applied while its answer is on the way, is judged
right.

Judge once the subscription is quiescent: everything that was sent has been received and acked, and
the group has polled in vain for longer than an invisible duration.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

SHOWN_MAX = 10  # findings of each kind in the text of a verdict


class Outcome(enum.Enum):
    """How a call ended, as its caller knows it."""

    OK = "ok"
    UNKNOWN = "unknown"  # no answer: it may have been carried out, now or later
    FAILED = "failed"  # refused: it was not carried out


@dataclass(slots=True, kw_only=True)
class Send:
    """One try to send a message; tried again it is another message with another key."""

    key: str
    message_group: str
    begun_at: int
    outcome: Outcome = Outcome.UNKNOWN

    def ended(self, outcome: Outcome) -> None:
        """Note how the send ended."""
        self.outcome = outcome


@dataclass(slots=True, kw_only=True)
class Ack:
    """One ack of a delivery."""

    key: str
    attempt: int
    begun_at: int
    clock: Iterator[int]
    place: str = ""  # as of the receive
    outcome: Outcome = Outcome.UNKNOWN
    ended_at: int | None = None

    def ended(self, outcome: Outcome) -> None:
        """Note how the ack ended."""
        self.outcome = outcome
        self.ended_at = next(self.clock)


class Receive(NamedTuple):
    """One message in the answer to a receive."""

    key: str
    received_at: int  # the same for all messages of one answer
    position: int  # in that answer
    attempt: int  # which delivery of the message it is, 0 where nobody says
    # The broker group that had it: a send that was moved to another one may be stored at both.
    place: str = ""


class Verdict(NamedTuple):
    """What is wrong with a history, as sentences; nothing when all lists are empty."""

    lost: Sequence[str]
    duplicated: Sequence[str]
    unexpected: Sequence[str]
    out_of_order: Sequence[str]

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return not any(self)

    def __str__(self) -> str:
        lines = []
        for name, findings in self._asdict().items():
            lines.append(f"{name}: {len(findings)}")
            lines += [f"  {finding}" for finding in findings[:SHOWN_MAX]]
        return "\n".join(lines)


@dataclass(slots=True)
class History:
    """Everything that was noted."""

    sends: dict[str, Send] = field(default_factory=dict)
    receives: list[Receive] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    _order_given_up_at: list[int] = field(default_factory=list)
    _clock: Iterator[int] = field(default_factory=count)

    def send(self, key: str, *, message_group: str = "") -> Send:
        """Note that a message is about to be sent; `key` names it, and its body says it.

        The messages of a message group are sent one after the other.
        """
        assert key not in self.sends, f"{key} is sent twice: the key must name one try"
        send = Send(key=key, message_group=message_group, begun_at=next(self._clock))
        self.sends[key] = send
        return send

    def received(
        self, keys: Sequence[str], attempts: Sequence[int] = (), places: Sequence[str] = ()
    ) -> None:
        """Note the messages of one answer, in its order: which delivery of each it is, of whom."""
        now = next(self._clock)
        attempts = attempts or [0] * len(keys)
        places = places or [""] * len(keys)
        self.receives += [
            Receive(key, now, position, attempt, place)
            for position, (key, attempt, place) in enumerate(
                zip(keys, attempts, places, strict=True)
            )
        ]

    def ack(self, key: str, attempt: int = 0, place: str = "") -> Ack:
        """Note that a delivery is about to be acked."""
        ack = Ack(
            key=key, attempt=attempt, begun_at=next(self._clock), clock=self._clock, place=place
        )
        self.acks.append(ack)
        return ack

    def give_up_order(self) -> None:
        """Note that what was sent before may come behind what comes from now on."""
        self._order_given_up_at.append(next(self._clock))

    def unsettled(self) -> set[str]:
        """Return what was sent with OK and not acked yet: what a drain has to wait for."""
        settled = {ack.key for ack in self.acks if ack.outcome is not Outcome.FAILED}
        return {
            key
            for key, send in self.sends.items()
            if send.outcome is Outcome.OK and key not in settled
        }

    def told_of_unsettled(self) -> str:
        """Return all that was noted of some of what is unsettled, a line each."""
        noted: list[Receive | Ack | Send] = [*self.receives, *self.acks, *self.sends.values()]
        return "\n".join(
            str(one)
            for key in sorted(self.unsettled())[:SHOWN_MAX]
            for one in noted
            if one.key == key
        )

    def judge(self) -> Verdict:
        """Compare what was seen with what is promised."""
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
        acked: dict[tuple[str, str], Ack] = {}
        for ack in self.acks:
            if ack.outcome is Outcome.OK and ack.ended_at is not None:
                acked.setdefault((ack.key, ack.place), ack)
        return [
            f"{one.key} came again after its ack was answered with OK"
            for one in self.receives
            if (place := (one.key, one.place)) in acked and _is_again(one, acked[place])
        ]

    def _unexpected(self) -> list[str]:
        findings = []
        for key, received_at, *_ in self.receives:
            send = self.sends.get(key)
            if send is None or send.begun_at > received_at:
                findings.append(f"{key} was never sent")
            elif send.outcome is Outcome.FAILED:
                findings.append(f"{key} came although its send was refused")
        return findings

    def _out_of_order(self) -> list[str]:
        """Find what overtook an earlier message of its message group.

        All earlier ones must be settled, or come before it in the same answer. A send of unknown
        outcome may be carried out late, so nothing has to wait for it.
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
            # Those that were settled before this receive were so before all later ones.
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
        """Return since when each message may count as settled.

        An ack is applied after its begin; one without an answer was not if the message came again.
        """
        last_received_at = {key: received_at for key, received_at, *_ in self.receives}
        settled_at: dict[str, int] = {}
        for ack in self.acks:
            is_applied = ack.outcome is Outcome.OK or (
                ack.outcome is Outcome.UNKNOWN and last_received_at.get(ack.key, 0) < ack.begun_at
            )
            if is_applied:
                settled_at.setdefault(ack.key, ack.begun_at)
        return settled_at


def _is_again(received: Receive, ack: Ack) -> bool:
    """Whether a message came again that was settled: in a delivery that is not an earlier one.

    An earlier one may have been on its way for longer than it was hidden from others.
    """
    assert ack.ended_at is not None, "the ack was answered"
    return received.received_at > ack.ended_at and received.attempt >= ack.attempt
