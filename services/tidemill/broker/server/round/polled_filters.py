"""The filters that polls use, and the conflicts that follow from them.

Two ways to consume a topic are allowed and almost always a mistake:

- Consumers of one group poll a topic with different filters. Each poll passes over the messages
  that its own filter does not match, also if another consumer wants them.
- A CONCURRENT consumer group polls a FIFO topic. It receives the messages out of order.

The round loop owns this state. A restart forgets it, and the next polls report it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import structlog

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.message_filter import TagFilter
from tidemill.broker.engine.metadata.catalog import TopicType

if TYPE_CHECKING:
    from tidemill.broker.engine.message_filter import MessageFilter
    from tidemill.broker.engine.metadata.catalog import Catalog

log = structlog.get_logger()

FILTER_LIFE_MS: Final = 600_000  # after its last poll a filter is no longer in use
FILTERS_MAX: Final = 16  # per consumer group and topic; the one polled longest ago goes first
PAIRS_MAX: Final = 20_000  # consumer groups and topics; the first known goes first
# Filters of all pairs, measured: 49 MB if client ids have 200 characters and filters
# `SHOWN_CHARACTERS`. The filters of the pair known first go first.
FILTERS_OF_ALL_MAX: Final = 50_000
# A filter may have 16 KiB. Operators see this part of it.
SHOWN_CHARACTERS: Final = 256
WARNING_INTERVAL_MS: Final = 3_600_000  # per consumer group, topic and kind of conflict


@dataclass(slots=True)
class PolledFilter:
    """A filter of a consumer group and topic, and its last poll."""

    tags: tuple[str, ...]  # those that operators see; empty: every message, or an SQL filter
    sql: str  # the part of an SQL filter that operators see
    client_id: str
    polled_at_ms: int  # monotonic

    @property
    def expression(self) -> str:
        """The filter in its canonical form, without the part that is left out."""
        return self.sql or " || ".join(self.tags) or "*"


def _shown_sql(expression: str) -> str:
    if len(expression) <= SHOWN_CHARACTERS:
        return expression
    return expression[:SHOWN_CHARACTERS] + "..."


def _shown_tags(tags: frozenset[str]) -> tuple[str, ...]:
    """Return the sorted tags of a filter that fit into `SHOWN_CHARACTERS`.

    If some do not fit, the last entry gives their number.
    """
    shown: list[str] = []
    left = SHOWN_CHARACTERS
    for tag in sorted(tags):
        left -= len(tag)
        if left < 0:
            shown.append(f"... {len(tags) - len(shown)} more")
            break
        shown.append(tag)
    return tuple(shown)


class ConsumptionConflict(NamedTuple):
    """The conflicts of a consumer group and topic; at least one of the two."""

    group: str
    topic: str
    # The different filters; empty unless there are several, or one that was wanted.
    filters: tuple[PolledFilter, ...]
    is_order_lost: bool


@final
class PolledFilters:
    """The filters of the polls of the last ten minutes, by consumer group and topic."""

    def __init__(self) -> None:
        # By the hash of the filter. Two filters with the same hash count as the same filter.
        self._by_pair: dict[tuple[int, int], dict[int, PolledFilter]] = {}
        self._count = 0  # filters of all pairs
        # When a warning was logged, by group id, topic id and kind.
        self._warned_at_ms: dict[tuple[int, int, str], int] = {}

    def __len__(self) -> int:
        """Return the number of filters of all consumer groups and topics."""
        return self._count

    def note(
        self,
        group_id: int,
        topic_id: int,
        wanted: MessageFilter,
        client_id: str,
        *,
        catalog: Catalog,
        monotonic_ms: int,
    ) -> None:
        """Note a poll. Each poll calls it, so a known filter must be cheap."""
        filters = self._by_pair.get((group_id, topic_id))
        known = None if filters is None else filters.get(hash(wanted))
        if known is not None and monotonic_ms - known.polled_at_ms <= FILTER_LIFE_MS:
            known.client_id, known.polled_at_ms = client_id, monotonic_ms
            return
        group, topic = catalog.groups.get(GroupId(group_id)), catalog.topics.get(TopicId(topic_id))
        if group is None or topic is None:
            return  # The poll fails.
        if filters is None:
            filters = self._new_pair(group_id, topic_id)
        self._count -= len(filters)
        for key, other in list(filters.items()):
            is_old = monotonic_ms - other.polled_at_ms > FILTER_LIFE_MS
            # A client has one filter for a topic: it has replaced its former one.
            if is_old or other.client_id == client_id:
                del filters[key]
        if len(filters) >= FILTERS_MAX:
            del filters[min(filters, key=lambda key: filters[key].polled_at_ms)]
        if isinstance(wanted, TagFilter):
            polled = PolledFilter(_shown_tags(wanted.tags), "", client_id, monotonic_ms)
        else:
            polled = PolledFilter((), _shown_sql(wanted.expression), client_id, monotonic_ms)
        filters[hash(wanted)] = polled
        self._count += len(filters)
        while self._count > FILTERS_OF_ALL_MAX:
            self._forget(*next(iter(self._by_pair)))
        self._warn(group_id, topic_id, catalog, monotonic_ms)

    def conflicts(
        self,
        catalog: Catalog,
        *,
        monotonic_ms: int,
        groups: frozenset[str] = frozenset(),
        with_single: bool = False,
    ) -> Iterator[ConsumptionConflict]:
        """Yield the conflicts of these consumer groups, or of all.

        If `with_single`, also yield consumer groups and topics with one filter.
        """
        for group_id, topic_id in list(self._by_pair):
            group = catalog.groups.get(GroupId(group_id))
            if groups and (group is None or group.name not in groups):
                continue
            conflict = self._conflict(
                group_id, topic_id, catalog, monotonic_ms, with_single=with_single
            )
            if conflict is not None:
                yield conflict

    def filters_of(
        self, group_id: int, topic_id: int, *, monotonic_ms: int
    ) -> frozenset[str] | None:
        """Return the tags that the filters of a group in a topic receive; None without a poll.

        An empty set stands for every message, and for filters that this list does not show whole.
        """
        tags: set[str] = set()
        is_polled = False
        for each in self._by_pair.get((group_id, topic_id), {}).values():
            if monotonic_ms - each.polled_at_ms > FILTER_LIFE_MS:
                continue
            is_polled = True
            if not each.tags or each.tags[-1].startswith("... "):
                return frozenset()
            tags.update(each.tags)
        return frozenset(tags) if is_polled else None

    def _new_pair(self, group_id: int, topic_id: int) -> dict[int, PolledFilter]:
        if len(self._by_pair) >= PAIRS_MAX:
            self._forget(*next(iter(self._by_pair)))
        return self._by_pair.setdefault((group_id, topic_id), {})

    def _forget(self, group_id: int, topic_id: int) -> None:
        self._drop(group_id, topic_id)
        for kind in ("filter", "order"):
            self._warned_at_ms.pop((group_id, topic_id, kind), None)

    def _drop(self, group_id: int, topic_id: int) -> None:
        self._count -= len(self._by_pair.pop((group_id, topic_id), ()))

    def _conflict(
        self,
        group_id: int,
        topic_id: int,
        catalog: Catalog,
        monotonic_ms: int,
        *,
        with_single: bool = False,
    ) -> ConsumptionConflict | None:
        """Return the conflicts of a pair; forget it if its group or topic was deleted.

        A pair without a filter in use is forgotten too.
        """
        group, topic = catalog.groups.get(GroupId(group_id)), catalog.topics.get(TopicId(topic_id))
        filters = self._by_pair.get((group_id, topic_id), {})
        current = tuple(
            each for each in filters.values() if monotonic_ms - each.polled_at_ms <= FILTER_LIFE_MS
        )
        if group is None or topic is None:
            self._forget(group_id, topic_id)
            return None
        if not current:
            # When it comes back, the time of its last warning still counts.
            self._drop(group_id, topic_id)
            return None
        is_order_lost = topic.type is TopicType.FIFO and not group.is_ordered
        if len(current) == 1 and not with_single:
            if not is_order_lost:
                return None
            current = ()
        return ConsumptionConflict(group.name, topic.name, current, is_order_lost)

    def _warn(self, group_id: int, topic_id: int, catalog: Catalog, monotonic_ms: int) -> None:
        conflict = self._conflict(group_id, topic_id, catalog, monotonic_ms)
        if conflict is None:
            return
        names = {"consumer_group": conflict.group, "topic": conflict.topic}
        if conflict.filters and self._is_due((group_id, topic_id, "filter"), monotonic_ms):
            log.warning(
                "consumers of one group filter a topic differently",
                **names,
                filters=[each.expression for each in conflict.filters],
                client_ids=[each.client_id for each in conflict.filters],
                advice="messages that only one filter matches can be lost for the group; use one"
                " filter, or a consumer group for each filter",
            )
        if conflict.is_order_lost and self._is_due((group_id, topic_id, "order"), monotonic_ms):
            log.warning(
                "a CONCURRENT consumer group reads a FIFO topic",
                **names,
                advice="it receives the messages out of order; read the topic with a FIFO group",
            )

    def _is_due(self, key: tuple[int, int, str], monotonic_ms: int) -> bool:
        """Whether a warning is due; note that it is logged."""
        warned_at_ms = self._warned_at_ms.get(key)
        if warned_at_ms is not None and monotonic_ms - warned_at_ms < WARNING_INTERVAL_MS:
            return False
        if len(self._warned_at_ms) >= PAIRS_MAX:
            del self._warned_at_ms[next(iter(self._warned_at_ms))]
        self._warned_at_ms[key] = monotonic_ms
        return True
