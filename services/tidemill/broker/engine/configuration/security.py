"""Changes of the security items: users, roles, tokens, quotas, bans and the mode (ADR 0071).

The home compares, counts and stores. The admin process decides what an item contains. It names the
version of the table that its decision is based on.

A follower copies the items with their versions, so that one version means one content everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Any, Final, final

from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.metadata.security_items import (
    COUNTS_MAX,
    DELETIONS,
    MODE,
    SECURITY_LEVEL,
    ItemKey,
    decode_security_item,
    deletion_item,
    is_deletion,
    key_of,
    version_item,
)
from tidemill.common.errors import BadRequest, Conflict

ITEMS_A_CHANGE: Final = 256  # one round records all of them
CHANGE_BYTES_MAX: Final = 1 << 20  # encoded; each link and each member gets them in one frame
# Encoded; a record has a head of 64 KiB at most. A user with 256 entries has about 40 KB.
ITEM_BYTES_MAX: Final = 60 << 10
NAME_BYTES_MAX: Final = 255
DEPTH_MAX: Final = 16  # of an item; entries of rights need 6
# Encoded bytes that are decided about or recorded between two yields: half a millisecond.
BYTES_A_SLICE: Final = 64 << 10
ITEM_COST: Final = 2_048  # of an empty item, in bytes
KEYS_A_SLICE: Final = 512  # compared in half a millisecond
# Of a copied table, in one round. Other work of the broker goes on between the rounds.
ITEMS_A_ROUND: Final = 128
BYTES_A_ROUND: Final = 256 << 10


@final
class CopyRounds:
    """The encoded changes of a copied table, divided into the parts of rounds.

    They stay encoded: the garbage collector would visit thousands of decoded items.
    """

    def __init__(self) -> None:
        self.all: list[list[bytes]] = []
        self._size = 0  # of the last part

    def add(self, encoded: bytes) -> None:
        """Add the next change."""
        if not self.all or self._size >= BYTES_A_ROUND or len(self.all[-1]) >= ITEMS_A_ROUND:
            self.all.append([])
            self._size = 0
        self.all[-1].append(encoded)
        self._size += len(encoded)


@final
class SecurityAdministration:
    """The commands that change the security items."""

    def __init__(
        self,
        catalog: Catalog,
        administration: Administration,
        *,
        groups_below: Callable[[int], list[str]],
    ) -> None:
        """`groups_below` returns the broker groups of the cluster below a feature level."""
        self._catalog = catalog
        self._table = catalog.security
        self._administration = administration
        self._groups_below = groups_below

    # ------------------------------------------------------------ at the home

    def change(
        self,
        items: Sequence[dict[str, Any]],
        *,
        expected_version: int,
        is_dry: bool = False,
        now_ms: int,
    ) -> Generator[None, None, int]:
        """Put and delete items that have no version yet; return the new version of the table.

        All items are recorded in one round, or none. `is_dry` only checks. Raises Forbidden,
        Conflict, BadRequest.
        """
        self._administration.check_home("users, roles and security settings")
        self._check_level()
        if expected_version != self._table.version:
            raise Conflict(
                f"the security items have version {self._table.version}, and this change was"
                f" decided on version {expected_version}; read them again and repeat the change"
            )
        if len(items) > ITEMS_A_CHANGE:
            raise BadRequest(
                f"the change has {len(items)} items; at most {ITEMS_A_CHANGE} are allowed"
            )
        numbered = []
        size = total = 0
        for version, item in enumerate(items, expected_version + 1):
            _check_form(item)
            numbered.append({**item, "version": version})
            encoded_size = len(encode_item(numbered[-1]))
            if encoded_size > ITEM_BYTES_MAX:
                raise BadRequest(
                    f"{_describe(key_of(item))} has {encoded_size} bytes; at most"
                    f" {ITEM_BYTES_MAX} are allowed"
                )
            size, total = size + encoded_size + ITEM_COST, total + encoded_size
            if total > CHANGE_BYTES_MAX:
                raise BadRequest(
                    f"the change has more than {CHANGE_BYTES_MAX} bytes; split it into several"
                )
            if size >= BYTES_A_SLICE:
                size = 0
                yield
        self._check_counts(items)
        if not is_dry:
            yield from self._record_all(numbered, now_ms)
        return expected_version + len(items)

    def _check_level(self) -> None:
        behind = self._groups_below(SECURITY_LEVEL)
        if behind:
            raise Conflict(
                f"users and rights need feature level {SECURITY_LEVEL}, and these broker groups are"
                f" below it: {', '.join(behind)}; upgrade all their replicas, and remove"
                f" feature_level_max"
            )

    def _check_counts(self, items: Sequence[dict[str, Any]]) -> None:
        """Raise an error if a kind gets too many items, or if a deleted item does not exist."""
        counts = {kind: self._table.count(kind) for kind in COUNTS_MAX}
        seen: set[ItemKey] = set()
        for item in items:
            key = kind, _ = key_of(item)
            if key in seen:
                raise BadRequest(f"{_describe(key)} is in the change twice; name it once")
            seen.add(key)
            is_known = self._table.find(key) is not None
            if item["op"] in DELETIONS:
                if not is_known:
                    raise BadRequest(f"{_describe(key)} does not exist, so it cannot be deleted")
                counts[kind] -= 1
            elif kind != MODE and not is_known:
                counts[kind] += 1
        for kind, count in counts.items():
            if count > COUNTS_MAX[kind]:
                raise BadRequest(
                    f"there would be {count} items of kind {kind}; at most {COUNTS_MAX[kind]} are"
                    f" allowed; delete some first"
                )

    def _record_all(self, items: Iterable[dict[str, Any]], now_ms: int) -> Iterator[None]:
        size = 0
        for item in items:
            self._administration.record(item, now_ms)
            found = self._table.find(key_of(item))
            size += len(found or b"") + ITEM_COST
            if size >= BYTES_A_SLICE:
                size = 0
                yield
        yield

    # ------------------------------------------------------------ at a follower

    @property
    def is_allowed(self) -> bool:
        """Whether the log of this broker may have security items.

        The log of a broker that joined later may be below the level of the cluster.
        """
        return self._catalog.feature_level >= SECURITY_LEVEL

    def follow(self, items: Iterable[bytes], version: int | None, now_ms: int) -> Iterator[None]:
        """Apply changes of the home, with their versions; None: the version did not change.

        Changes that the table here has already are not recorded again. Raises BadRequest.
        """
        if not self.is_allowed:
            return
        table = self._table
        for encoded in items:
            item = _decode(encoded)
            known = table.find(key_of(item))
            if known != encoded and (known is not None or not is_deletion(item)):
                self._administration.record(item, now_ms)
            yield
        if version is not None:
            self.note_version(version, now_ms)

    def plan_copy(
        self, homes: Mapping[ItemKey, bytes], *, version: int
    ) -> Generator[None, None, list[list[bytes]]]:
        """Return the changes that turn the table here into the table of the home, by rounds.

        Deletions come first, then items by version: meanwhile the table here has no item that the
        home has deleted, and its version is not higher than its content. Raises BadRequest.
        """
        if not self.is_allowed:
            return []
        own = dict(self._table.items)
        rounds = CopyRounds()
        for keys in _in_parts(own):
            # A home that was restored from a backup may have a lower version.
            common = min(version, self._table.version)
            for key in keys:
                if key not in homes:
                    rounds.add(encode_item(deletion_item(key, common)))
            yield
        runs: list[list[tuple[int, bytes]]] = []  # each in the order of the versions
        size = 0
        for keys in _in_parts(homes):
            run: list[tuple[int, bytes]] = []
            for encoded in [homes[key] for key in keys if own.get(key) != homes[key]]:
                run.append((_decode(encoded)["version"], encoded))
                size += len(encoded) + ITEM_COST
                if size >= BYTES_A_SLICE:
                    size = 0
                    yield
            run.sort()
            runs.append(run)
            yield
        for n, (_, encoded) in enumerate(merge(*runs), 1):
            rounds.add(encoded)
            if n % KEYS_A_SLICE == 0:
                yield
        return rounds.all

    def copy(self, items: Iterable[bytes], now_ms: int) -> Iterator[None]:
        """Record the changes of one round of `plan_copy`."""
        yield from self._record_all(map(_decode, items), now_ms)

    def note_version(self, version: int, now_ms: int) -> None:
        """Record the version of the home's table, which has been copied completely.

        It is lower than the version here if the home was restored from a backup.
        """
        if self.is_allowed and version != self._table.version:
            self._administration.record(version_item(version), now_ms)

    def forget_all(self, now_ms: int) -> Iterator[None]:
        """Forget the table of a home that this broker has left."""
        changes = yield from self.plan_copy({}, version=0)
        for part in changes:
            yield from self.copy(part, now_ms)
        self.note_version(0, now_ms)


def _check_form(item: dict[str, Any]) -> None:
    """Raise BadRequest unless an item of a change has the form of a put or of a deletion."""
    op = item.get("op")
    if not isinstance(op, str) or op not in {MODE, *COUNTS_MAX, *DELETIONS}:
        kinds = ", ".join((MODE, *COUNTS_MAX, *DELETIONS))
        raise BadRequest(f"security items of kind {op!r} are unknown; known are {kinds}")
    fields = {"op"}
    if op != MODE:
        fields.add("name")
        _check_name(op, item.get("name"))
    if op not in DELETIONS:
        fields.add(op)
        if not isinstance(item.get(op), dict):
            raise BadRequest(f"{_describe(key_of(item))} has no object in its field {op!r}")
    if item.keys() != fields:
        raise BadRequest(
            f"{_describe(key_of(item))} has the fields {', '.join(sorted(item))}; it needs exactly"
            f" {', '.join(sorted(fields))}"
        )
    if not _is_shallow(item):
        raise BadRequest(
            f"{_describe(key_of(item))} is nested deeper than {DEPTH_MAX} levels; make it flatter"
        )


def _check_name(op: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise BadRequest(f"an item of kind {op} has no name; set the field name")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise BadRequest(f"the name {name!r} is not valid Unicode") from error
    if size > NAME_BYTES_MAX:
        raise BadRequest(
            f"the name {name!r} has {size} bytes; at most {NAME_BYTES_MAX} are allowed"
        )


def _is_shallow(item: dict[str, Any]) -> bool:
    """Return whether every decoder can read an item: decoders limit the depth, too."""
    values: list[Any] = [item]
    for _ in range(DEPTH_MAX):
        values = [
            child
            for value in values
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    return not any(isinstance(value, (dict, list)) for value in values)


def _describe(key: ItemKey) -> str:
    kind, name = key
    return "the security mode" if kind == MODE else f"{kind} {name!r}"


def _decode(encoded: bytes) -> dict[str, Any]:
    try:
        return decode_security_item(encoded)
    except ValueError as error:
        raise BadRequest(f"the home sent an unreadable security item: {error}") from error


def _in_parts(items: Mapping[ItemKey, bytes]) -> Iterator[list[ItemKey]]:
    keys = iter(items)
    while part := list(islice(keys, KEYS_A_SLICE)):
        yield part
