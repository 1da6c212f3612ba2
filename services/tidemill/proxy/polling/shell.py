"""The asyncio shell around `Polling`: it carries out the actions.

Each receive carries out its own steps: it pops, reports the result, and waits. An event that
concerns several receives is processed at once. One timer is the only background work.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.common.errors import ServiceError, TopicNotFound
from tidemill.message.client_key import ClientKey
from tidemill.proxy.filters import WantedMessages
from tidemill.proxy.polling.counts import PollCounts
from tidemill.proxy.polling.level_order import HintLevels
from tidemill.proxy.polling.notifications import NotificationStart, NotificationStop
from tidemill.proxy.polling.pair import PairKey, PairPoll, PairWatch, PollPair
from tidemill.proxy.polling.poll import Broker, Outcome, PollEnd, PopStep
from tidemill.proxy.polling.polling import LeftMessages, Polling, PollWakeup, PopCancellation
from tidemill.proxy.polling.single_receive import SingleBrokerReceive
from tidemill.security.permit_buckets import RENEWAL_MS
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.quotas.deliveries import DeliveryPermits, DeliveryQuotas, WaitingRead

# Time after the poll duration until a notification without answer fails.
NOTIFICATION_GRACE_MS: Final = 3_000


class PopFailure(Exception):
    """A failed pop. The poll has been informed."""


class _PendingNotification(NamedTuple):
    """A notification in flight."""

    number: int
    link: BrokerLink
    request_id: int


class PollTarget(NamedTuple):
    """Consumer group and topic of a pair, in the configuration of the home."""

    group: link_pb2.GroupConfig
    topic: link_pb2.TopicConfig


@final
class PollingShell:
    """The polls of this proxy at several brokers."""

    def __init__(
        self,
        cluster: BrokerCluster,
        clock: Clock,
        *,
        pop_timeout_ms: int,
        quotas: DeliveryQuotas | None = None,
    ) -> None:
        """Use `pop_timeout_ms` as the timeout of pops that do not wait.

        Without `quotas`, deliveries have none.
        """
        self.quotas = quotas
        if quotas is not None:
            quotas.add_listener(self._unpark_limited)
        self._cluster = cluster
        cluster.add_listener(self._refresh)
        self.counts = PollCounts()
        self.polling = Polling(self.counts, random=random.random)
        self.pop_timeout_ms = pop_timeout_ms
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._brokers: dict[Broker, LinkedGroup] = {}
        self._receives: dict[PairPoll, MultiBrokerReceive] = {}
        self._directs: set[SingleBrokerReceive] = set()
        self._open: dict[ClientKey, set[MultiBrokerReceive | SingleBrokerReceive]] = {}
        self._asked: dict[PairWatch, _PendingNotification] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0

    def now_ms(self) -> int:
        """Return the monotonic time of polls."""
        return self._clock.monotonic_ms()

    def begin(
        self,
        target: PollTarget,
        brokers: Sequence[LinkedGroup],
        pop: link_pb2.PopRequest,
        *,
        timeout_ms: int,
    ) -> MultiBrokerReceive:
        """Begin a receive; the caller ends it with `close`.

        A receive that does not wait pops at all brokers within `timeout_ms`.
        """
        wanted = WantedMessages(tuple(pop.tags), pop.sql)
        names = [self._register(broker) for broker in brokers]
        has_levels = len(names) > 1 and target.topic.type == link_pb2.TOPIC_TYPE_PRIORITY
        pop.wants_remaining = has_levels
        is_ordered = target.group.delivery_order == link_pb2.DELIVERY_ORDER_ORDERED
        poll = self.polling.begin(
            PairKey(target.topic.name, target.group.name, wanted),
            names,
            poll_ms=pop.poll_duration_ms,
            # A repeated attempt gets its earlier batch, which any broker may have.
            asks_all=is_ordered and bool(pop.attempt_id),
            now_ms=self.now_ms(),
            once_ms=timeout_ms,
            silent=frozenset([broker.name for broker in brokers if not broker.link.is_up]),
            target=target,
            may_park=not self.is_limited(target.group.name),
            priority_factor=target.group.priority_factor if has_levels else None,
            max_messages=pop.max_messages,
        )
        client = ClientKey(pop.client_id, pop.owner)
        receive = self._receives[poll] = MultiBrokerReceive(self, poll, client)
        self._open.setdefault(client, set()).add(receive)
        self.carry_out()
        return receive

    def is_limited(self, group: str) -> bool:
        """Whether the consumer group has a quota. Its polls wait for hints, and then for permits.

        A pop that is parked at a broker would hold permits that other polls could use.
        """
        return self.quotas is not None and self.quotas.is_limited(group)

    def begin_direct(self, link: BrokerLink, client: ClientKey, group: str) -> SingleBrokerReceive:
        """Begin a receive at the only broker group; the caller ends it with `end_direct`."""
        direct = SingleBrokerReceive(link, client, group)
        self._directs.add(direct)
        self._open.setdefault(client, set()).add(direct)
        return direct

    def end_direct(self, direct: SingleBrokerReceive) -> None:
        """End a receive at the only broker group."""
        self._directs.discard(direct)
        self._close(direct)

    def open_polls(self, client_id: str) -> dict[ClientKey, int]:
        """Return the number of open polls of a client id, by owner."""
        return {key: len(polls) for key, polls in self._open.items() if key.client_id == client_id}

    def end_client(self, client: ClientKey) -> None:
        """Answer the open polls of a client empty, because it ends."""
        for receive in self._open.get(client, set()).copy():
            receive.end()
        self.carry_out()

    def _close(self, receive: MultiBrokerReceive | SingleBrokerReceive) -> None:
        receives = self._open[receive.client]
        receives.discard(receive)
        if not receives:
            del self._open[receive.client]

    def broker(self, name: Broker) -> LinkedGroup:
        """Return the broker group of a step."""
        return self._brokers[name]

    def forget(self, poll: PairPoll) -> None:
        """End a receive in any state."""
        self.polling.cancel(poll, self.now_ms())
        self.carry_out()
        self._close(self._receives.pop(poll))

    def release(self) -> None:
        """Answer every poll empty, because the process stops."""
        if self.quotas is not None:
            self.quotas.release()
        self.polling.release(self.now_ms())
        self.carry_out()

    def _register(self, broker: LinkedGroup) -> Broker:
        name = broker.name
        if self._brokers.get(name) is not broker:
            self._brokers[name] = broker
            broker.link.add_observer(_LinkObserver(self, name, broker))
            if broker.link.is_connected:
                self.polling.reconnected(name, self.now_ms())
            else:
                self.polling.lost(name, self.now_ms())
        return name

    def _refresh(self) -> None:
        """Add brokers that have the topic and consumer group now to waiting polls."""
        if self._directs and not self._cluster.is_single:
            for direct in self._directs:
                direct.stop()
        for pair in list(self.polling.pairs.values()):
            assert isinstance(pair.target, PollTarget), "the polls of a pair have one target"
            group, topic = pair.target
            brokers = self._cluster.brokers_of(topic, group)
            names = [self._register(broker) for broker in brokers]
            # If no broker has them, they were deleted, and the next pop reports that.
            if names and set(names) != pair.watches.keys():
                self.polling.brokers_changed(pair, names, self.now_ms())
        self.carry_out()

    def _unpark_limited(self) -> None:
        """End the pops that are parked at brokers for consumer groups with a quota."""
        for direct in self._directs:
            if self.is_limited(direct.group):
                direct.stop()
        for pair in list(self.polling.pairs.values()):
            if self.is_limited(pair.key.group):
                self.polling.unpark(pair, self.now_ms())
        self.carry_out()

    # ------------------------------------------------------------ actions

    def carry_out(self) -> None:
        """Carry out the actions of the last event."""
        while actions := self.polling.take_actions():
            for action in actions:
                match action:
                    case PollWakeup(poll):
                        self._receives[poll].wake()
                    case PopCancellation(poll):
                        if (receive := self._receives.get(poll)) is not None:
                            receive.stop_pop()
                    case NotificationStart(watch, number):
                        self._ask(watch, number, action)
                    case NotificationStop(watch, number):
                        self._stop_asking(watch, number)
        self._arm()

    def _ask(self, watch: PairWatch, number: int, start: NotificationStart[PollPair]) -> None:
        target = watch.pair.target
        assert isinstance(target, PollTarget), "the polls of a pair have one target"
        broker = self._brokers[watch.broker]
        ids = broker.find_ids(target.group, target.topic)
        if ids is None:
            error = TopicNotFound("the topic or the group was deleted; query its route again")
            self.polling.notification_failed(watch, number, error, self.now_ms())
            return
        request = link_pb2.NotificationRequest(
            group_id=ids.group_id,
            topic_id=ids.topic_id,
            tags=watch.pair.key.wanted.tags,
            sql=watch.pair.key.wanted.sql,
            poll_duration_ms=start.poll_ms,
            level_min=start.level_min,
        )
        try:
            future = broker.link.notify(request, timeout_ms=start.poll_ms + NOTIFICATION_GRACE_MS)
        except ServiceError as error:
            self.polling.notification_failed(watch, number, error, self.now_ms())
            return
        self._asked[watch] = _PendingNotification(number, broker.link, request.request_id)
        future.add_done_callback(lambda done: self._answered(watch, number, done))

    def _answered(
        self, watch: PairWatch, number: int, done: asyncio.Future[link_pb2.NotificationReply]
    ) -> None:
        asked = self._asked.get(watch)
        if asked is not None and asked.number == number:
            del self._asked[watch]
        error = done.exception()
        if error is None:
            reply = done.result()
            self.polling.notified(
                watch,
                number,
                reply.ready_count,
                self.now_ms(),
                is_unsure=reply.is_unsure,
                levels=_levels_of(reply),
            )
        else:
            assert isinstance(error, ServiceError), "a link fails a request with one of ours"
            self.polling.notification_failed(watch, number, error, self.now_ms())
        self.carry_out()

    def _stop_asking(self, watch: PairWatch, number: int) -> None:
        asked = self._asked.get(watch)
        if asked is not None and asked.number == number:
            del self._asked[watch]
            asked.link.stop_notification(asked.request_id)

    def _arm(self) -> None:
        """Set the timer to the next due time."""
        due_ms = self.polling.next_due_ms()
        if due_ms is None or (self._timer is not None and self._timer_at_ms <= due_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = due_ms
        delay_ms = max(due_ms - self.now_ms(), 0)
        self._timer = self._loop.call_later(delay_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.polling.due(self.now_ms())
        self.carry_out()


@final
class MultiBrokerReceive:
    """One receive for its caller."""

    __slots__ = ("_link", "_permits", "_poll", "_read", "_request", "_shell", "_woken", "client")

    def __init__(self, shell: PollingShell, poll: PairPoll, client: ClientKey) -> None:
        self.client = client
        self._shell = shell
        self._poll = poll
        self._woken: asyncio.Future[None] | None = None
        self._link: BrokerLink | None = None  # link and request of the pop in flight
        self._request: link_pb2.PopRequest | None = None
        self._read: WaitingRead | None = None  # while the pop waits for permits
        self._permits: DeliveryPermits | None = None  # of the last pop

    async def step(self) -> PopStep | PollEnd:
        """Wait for the next step: a pop or the end."""
        while self._poll.step is None:
            self._woken = asyncio.get_running_loop().create_future()
            try:
                await self._woken
            finally:
                self._woken = None
        return self._poll.step

    async def take_permits(self, wanted: int, *, wait_ms: int | None = None) -> bool:
        """Wait for permits for the next pop, at most until the end of the poll.

        Return False without permits. If the consumer group has no quota, return True. `wait_ms` is
        shorter than the poll. A poll that does not wait has the time of a renewal.
        """
        poll, quotas = self._poll, self._shell.quotas
        self.return_permits()  # The caller could not use the messages of the pop before.
        if quotas is None or poll.is_stopping:
            return True
        read = self._read = quotas.request(poll.pair.key.group, wanted)
        if not poll.is_long:
            wait_ms = min(RENEWAL_MS if wait_ms is None else wait_ms, RENEWAL_MS)
        timer = None
        if wait_ms is not None:
            timer = asyncio.get_running_loop().call_later(wait_ms / 1_000, read.stop)
        try:
            self._permits = await quotas.wait(read)
        finally:
            self._read = None
            if timer is not None:
                timer.cancel()
        return self._permits is not None

    async def pop(self, request: link_pb2.PopRequest, *, timeout_ms: int) -> link_pb2.PopReply:
        """Carry out the pop of the step, at most until the end of the poll.

        The caller takes permits before. Raises PopFailure if the pop fails. The poll then has
        another step.
        """
        poll, shell, step = self._poll, self._shell, self._poll.step
        # The poll may have ended in the turn of its permits.
        if poll.is_stopping or not isinstance(step, PopStep):
            self.return_permits()
            return link_pb2.PopReply()
        if self._permits is not None:
            request.max_messages = self._permits.messages
        timeout_ms = min(timeout_ms, poll.hard_end_ms - shell.now_ms())
        if not step.poll_ms:
            timeout_ms = min(timeout_ms, shell.pop_timeout_ms)
        self._link, self._request = shell.broker(step.broker).link, request
        try:
            reply = await self._link.pop(request, timeout_ms=max(timeout_ms, 0))
        except ServiceError as error:
            self.return_permits()
            shell.polling.pop_failed(poll, error, shell.now_ms())
            shell.carry_out()
            raise PopFailure from error
        finally:
            self._link = self._request = None
        if self._permits is not None:
            self._permits.spend(*_size_of(reply))
        return reply

    def return_permits(self) -> None:
        """Return the permits of the last pop: its messages do not reach the client."""
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.give_back()

    def popped(self, reply: link_pb2.PopReply) -> bool:
        """Report the reply of the pop. Return False if its messages must go back."""
        count = sum(len(batch.indexes) for batch in reply.batches)
        levels: Counter[int] = Counter()
        for batch in reply.batches:
            levels[batch.queue_id] += len(batch.indexes)
        left = None
        if reply.HasField("remaining"):
            remaining = reply.remaining
            left = LeftMessages(remaining.ready_count, _levels_of(remaining))
        is_taken = self._shell.polling.popped(
            self._poll,
            count=count,
            was_parked=reply.was_parked,
            now_ms=self._shell.now_ms(),
            levels=levels,
            left=left,
        )
        self._shell.carry_out()
        if is_taken:
            self._permits = None  # They are spent.
        return is_taken

    @property
    def is_first_hit(self) -> bool:
        """Whether the first pop found messages without waiting."""
        end = self._poll.step
        return isinstance(end, PollEnd) and end.outcome is Outcome.FOUND_AT_FIRST

    def fail(self, error: ServiceError) -> None:
        """End the poll with an error of the caller."""
        self._shell.polling.fail(self._poll, error, self._shell.now_ms())
        self._shell.carry_out()

    def end(self) -> None:
        """Answer the receive empty. The caller carries out the actions."""
        self._shell.polling.end_empty(self._poll, self._shell.now_ms())

    def close(self) -> None:
        """End the receive in any state."""
        self.return_permits()
        self._shell.forget(self._poll)

    def wake(self) -> None:
        """Wake the caller, because there is another step."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def stop_pop(self) -> None:
        """Cancel the pop in flight, or the pop that has not begun."""
        if self._read is not None:
            self._read.stop()
        if self._link is not None and self._request is not None:
            self._link.stop_pop(self._request.request_id)


@final
class _LinkObserver:
    """Observer of one link for the polls."""

    def __init__(self, shell: PollingShell, name: Broker, broker: LinkedGroup) -> None:
        self._shell = shell
        self._name = name
        self._broker = broker

    @property
    def _is_replaced(self) -> bool:
        """Whether another broker group at another address has this name now."""
        return self._shell.broker(self._name) is not self._broker

    def on_connected(self) -> None:
        if not self._is_replaced:
            self._shell.polling.reconnected(self._name, self._shell.now_ms())
            self._shell.carry_out()

    def on_lost(self) -> None:
        if not self._is_replaced:
            self._shell.polling.lost(self._name, self._shell.now_ms())
            self._shell.carry_out()

    def on_released(self) -> None:
        self._shell.release()


def _levels_of(reply: link_pb2.NotificationReply | link_pb2.RemainingMessages) -> HintLevels | None:
    """Return the levels in a reply; None without messages, and from an older broker."""
    if not reply.HasField("levels"):
        return None
    levels = reply.levels
    return HintLevels(levels.highest, levels.oldest_at_ms, levels.oldest_lower_at_ms)


def _size_of(reply: link_pb2.PopReply) -> tuple[int, int]:
    """Return the number of messages of a reply, and the bytes of these stored messages."""
    blobs = [blob for batch in reply.batches for blob in batch.blobs]
    return len(blobs), sum(map(len, blobs))
