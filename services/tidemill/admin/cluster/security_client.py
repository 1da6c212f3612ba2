"""Users, roles and the security mode at the home: read them, and change them on a known version."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.common.errors import Conflict
from tidemill.security.table import MODE
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# Changes of other administrators between the read and the change.
ATTEMPTS_MAX: Final = 5
PAGE_ITEMS: Final = 1_000

Item = Mapping[str, Any]


class FoundItem(NamedTuple):
    """An item, and the version of the table at its read."""

    encoded: bytes | None  # None: there is no such item
    version: int
    is_from_home: bool = True  # the copy of another broker group may be older


class ListedItems(NamedTuple):
    """Items of one kind in the order of their names."""

    encoded: Sequence[bytes]
    has_more: bool
    version: int  # of the table at the read


@final
class SecurityClient:
    """The security items of a cluster."""

    def __init__(
        self, brokers: Brokers, on_change: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        """`on_change` is awaited after a change, with the new version of the table."""
        self._brokers = brokers
        self._on_change = on_change

    async def find(self, kind: str, name: str) -> FoundItem:
        """Return an item by its name; "" for the security mode alone."""
        if not name and kind != MODE:
            return FoundItem(None, 0)
        request = pb.ListSecurityRequest(kind=kind, name=name, limit=1)
        found = await self._brokers.call_home(calls.LIST_SECURITY, request)
        answer = max(found.answers, key=lambda each: each.value.version)
        items = answer.value.items
        return FoundItem(items[0] if items else None, answer.value.version, not found.unreachable)

    async def page(self, kind: str, after_name: str, limit: int) -> ListedItems:
        """Return the items after a name; "" for the first ones."""
        request = pb.ListSecurityRequest(kind=kind, after_name=after_name, limit=limit)
        [answer, *_] = (await self._brokers.call_home(calls.LIST_SECURITY, request)).answers
        return ListedItems(answer.value.items, answer.value.has_more, answer.value.version)

    async def all(self, kind: str, *, page_items: int = PAGE_ITEMS) -> AsyncIterator[bytes]:
        """Yield all items of a kind."""
        after = ""
        while True:
            found = await self.page(kind, after, page_items)
            for encoded in found.encoded:
                yield encoded
            if not found.has_more:
                return
            after = json.loads(found.encoded[-1])["name"]

    async def change(
        self,
        kind: str,
        name: str,
        decide: Callable[[FoundItem], Sequence[Item]],
        *,
        caller: str,
        audit: pb.ChangeAuthor,
        dry_run: bool = False,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> int:
        """Change items by a decision on one of them; return the version of the table afterwards.

        If the table changed meanwhile, `check` and the decision are made again. Both raise for a
        refused change, and `decide` returns nothing if nothing changes. Raises Conflict after
        ATTEMPTS_MAX changes by others.
        """
        attempt = 0
        while True:
            found = await self.find(kind, name)
            if check is not None:
                await check()
            items = decide(found)
            if not items:
                return found.version
            attempt += 1
            try:
                return await self.put(
                    items, found.version, caller=caller, audit=audit, dry_run=dry_run
                )
            except Conflict:
                now = await self.find(kind, name)
                if attempt == ATTEMPTS_MAX or now.version == found.version:
                    raise

    async def put(
        self,
        items: Sequence[Item],
        expected_version: int,
        *,
        caller: str,
        audit: pb.ChangeAuthor,
        dry_run: bool = False,
    ) -> int:
        """Change items, all or none; return the version of the table afterwards.

        Raises Conflict if the table has another version than the expected one.
        """
        request = pb.ChangeSecurityRequest(
            expected_version=expected_version,
            items=[json.dumps(item).encode() for item in items],
            dry_run=dry_run,
            requested_by=caller,
            audit=audit,
        )
        home = await self._brokers.home()
        version = (await home.call(calls.CHANGE_SECURITY, request)).version
        if self._on_change is not None and not dry_run:
            await self._on_change(version)
        return version
