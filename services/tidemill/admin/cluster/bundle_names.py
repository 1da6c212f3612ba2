"""Names in support bundles, replaced by hashes (ADR 0101)."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import re
from collections.abc import Generator, Iterable
from typing import Any, Final, final

HIDDEN: Final = "hidden"
# Names in any text: of topics, consumer groups, users and clients, and IP addresses.
_WORD: Final = re.compile(r"[A-Za-z0-9_%|.@#+-]+")
_ADDRESS: Final = re.compile(r"(\d{1,3}\.){3}\d{1,3}")
# A candidate for an IPv6 address, also in brackets and behind a word and a colon. A time such as
# 12:30:01 is no address. The zone of a link-local address follows a %, and %5B and %5D are the
# brackets of a peer of gRPC.
_ADDRESS_6: Final = re.compile(
    r"(?:(?<=[^:]:)|(?<=%5B)|(?<![\w:.%]))"
    r"([0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:(?:\d{1,3}\.){3}\d{1,3})?)"
    r"(?!\w|:[0-9A-Fa-f:]|\.\d)(%(?!5[Dd])[A-Za-z0-9_.-]*[A-Za-z0-9])?"
)
_ENDS: Final = ".|@#+-%"  # after a name at the end of a sentence
_SYSTEM: Final = ("%RETRY%", "%DLQ%")
# Fields that hold a name as their whole text, also in lists.
_NAMES: Final = frozenset(
    {
        "certificates",
        "claimedUser",
        "claimed_user",
        "client",
        "clientId",
        "client_id",
        "clients",
        "consumerGroup",
        "consumer_group",
        "expression",
        "group",
        "groups",
        "messageGroup",
        "originTopic",
        "owner",
        "receivers",
        "roles",
        "serviceAccounts",
        "subject",
        "tag",
        "topic",
        "topics",
        "user",
        "users",
    }
)
_NAMED: Final = frozenset({"clients", "groups", "roles", "tokens", "topics", "users"})
_CALLERS: Final = frozenset({"by", "changedBy", "requestedBy", "settledBy", "stoppedBy", "keptBy"})
_FREE: Final = frozenset({"reason", "pauseReason", "pause_reason"})
# Fields with a fixed set of texts, or names of processes.
_KEPT: Final = frozenset(
    {
        "action",
        "actions",
        "broker",
        "call",
        "decision",
        "kind",
        "level",
        "master",
        "messageType",
        "process",
        "result",
        "state",
        "timestamp",
        "type",
        "via",
    }
)
_PROCESS_LISTS: Final = {"processes.json": "items", "broker-groups.json": "brokerGroups"}


@final
class HiddenNames:
    """Replaces names in the files of one bundle. Equal names have equal hashes."""

    def __init__(self, key: bytes) -> None:
        """`key` is the key of the hashes."""
        self._key = key
        self._names: set[str] = set()
        self._processes: set[str] = set()

    def add_processes(self, file: str, text: str) -> None:
        """Remember names of processes and broker groups of a file; these names stay."""
        if file in _PROCESS_LISTS:
            for one in json.loads(text).get(_PROCESS_LISTS[file]) or ():
                self._processes.add(str(one.get("name")))

    def replaced(self, file: str, text: str) -> Generator[None, None, str]:
        """Return a file without names. Other texts lose the names that were found before.

        So all files are read twice.
        """
        if file.endswith(".json"):
            document = yield from self._value("", "", json.loads(text), file)
            return json.dumps(document, indent=1) + "\n"
        lines = []
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                shown = yield from self._value("", "", event, file)
                lines.append(json.dumps(shown))
            else:
                # A long line is cut, and a line for a terminal is not JSON.
                lines.append(json.dumps({"event": "hidden, because the line is not JSON"}))
            yield
        return "".join(f"{line}\n" for line in lines)

    def _value(self, owner: str, field: str, value: Any, file: str) -> Generator[None, None, Any]:
        """Return a value without names. `owner` is the field of the object with this field."""
        if isinstance(value, dict):
            yield
            shown = {}
            for key, each in value.items():
                shown[key] = yield from self._value(field, key, each, file)
            return shown
        if isinstance(value, list):
            texts = list(value)
            for place, each in enumerate(value):
                texts[place] = yield from self._value(owner, field, each, file)
            return texts
        return self._text(owner, field, value, file) if isinstance(value, str) else value

    def _text(self, owner: str, field: str, text: str, file: str) -> str:
        if not text or field in _KEPT:
            return text
        if field in _FREE:
            return HIDDEN
        if field in _NAMES or (field == "id" and owner == "errors"):
            return self._hash(text)
        if field == "name" and not file.startswith("processes/"):
            is_process = text in self._processes and owner not in _NAMED
            return text if is_process else self._subject(text)
        if field == "resource":
            return self._resource(text)
        if field == "items":
            return " ".join(self._item(text))
        if field in _CALLERS:
            user, at, address = text.rpartition(" at ")
            return f"{self._hash(user)}{at}{self._free(address)}" if at else self._hash(text)
        return self._free(text)

    def _resource(self, text: str) -> str:
        """Replace the name of a resource such as Topic:orders*."""
        kind, colon, name = text.partition(":")
        if kind == "Cluster" or not colon:
            return text
        return f"{kind}:{self._subject(name) if kind == 'Quota' else self._hash(name)}"

    def _subject(self, text: str) -> str:
        """Replace the subject of a quota such as client:orders-1, or another name."""
        kind, colon, name = text.partition(":")
        return f"{kind}:{self._hash(name)}" if colon else self._hash(text)

    def _item(self, text: str) -> Iterable[str]:
        """Yield the kind and the name of a security item of a log line."""
        kind, space, name = text.partition(" ")
        yield kind
        if space:
            yield self._subject(name)

    def _free(self, text: str) -> str:
        """Replace known names and addresses within a text."""

        def word(found: re.Match[str]) -> str:
            whole = found.group()
            stripped = whole.rstrip(_ENDS)
            for name in (whole, stripped):
                system = next((each for each in _SYSTEM if name.startswith(each)), "")
                if name.removeprefix(system) in self._names or _ADDRESS.fullmatch(name):
                    return self._hash(name) + whole.removeprefix(name)
            return whole

        return _WORD.sub(word, _ADDRESS_6.sub(self._address_6, text))

    def _address_6(self, found: re.Match[str]) -> str:
        """Return the hash of an IPv6 address, and every other text as it is."""
        whole, zone = found.group(1), found.group(2) or ""
        begin = ":" if whole[0] == ":" != whole[1] else ""  # A colon may precede the address.
        whole = whole.removeprefix(begin)
        for colon in ("", ":"):  # A colon may follow the address.
            with contextlib.suppress(ValueError):
                address = ipaddress.IPv6Address(whole.removesuffix(colon))
                return f"{begin}{HIDDEN}-{self._digest(address.compressed + zone)}{colon}"
        return found.group()

    def _hash(self, text: str) -> str:
        """Return the hash of a name, and remember it. A prefix stays one, and * stays."""
        system = next((each for each in _SYSTEM if text.startswith(each)), "")
        bare = text.removeprefix(system).removesuffix("*")
        star = "*" if text.endswith("*") else ""
        if not bare:
            return text
        if not _ADDRESS.fullmatch(bare):
            # The other texts name a certificate or service account in parts.
            self._names.update([bare, *(part for part in _WORD.findall(bare) if len(part) > 2)])
        return f"{system}{HIDDEN}-{self._digest(bare)}{star}"

    def _digest(self, bare: str) -> str:
        return hashlib.blake2s(bare.encode(), key=self._key, digest_size=5).hexdigest()
