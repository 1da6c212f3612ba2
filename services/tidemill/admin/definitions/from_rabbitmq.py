"""Topics, consumer groups and users from the JSON of `rabbitmqctl export_definitions`.

An exchange becomes a topic, and a queue the consumer group of the topics of its exchanges. The
routing key of a direct binding is the tag by which the consumers of the group subscribe.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import Any, Final, final

from tidemill.admin.definitions.conversion import (
    Foreign,
    Report,
    check_texts,
    listed,
    number,
    own_group,
    own_topic,
    own_user,
    part,
    reason_of,
    retention_of,
    text,
)
from tidemill.admin.definitions.rabbitmq_entries import ConvertedEntries
from tidemill.admin.json.definitions import ConversionView, ForeignFile
from tidemill.common.errors import Conflict, ServiceError
from tidemill.message.resource_names import NAMESPACE_SEPARATOR

DEFAULT_VHOST: Final = "/"
ATTEMPTS_MAX: Final = 1_000
_KNOWN: Final = frozenset(
    {"vhosts", "users", "permissions", "queues", "exchanges", "bindings", "policies"}
)
_TAG: Final = re.compile("[A-Za-z0-9_.:-]+")
_STRANGE: Final = re.compile("[^A-Za-z0-9_-]")
_LITERAL: Final = re.compile(r"\^([A-Za-z0-9_-]+)\$")
_BEGIN: Final = re.compile(r"\^([A-Za-z0-9_-]+)\.\*\$?")
_ALL: Final = frozenset({".*", "^.*$", "^.*"})
_DELAYED: Final = "x-delayed-message"
# Arguments of queues that need nothing here: storage and replication are of the cluster.
_NEEDLESS: Final = frozenset({"x-queue-type", "x-quorum-initial-group-size", "x-queue-mode"})
_CONVERTED: Final = frozenset({"x-delivery-limit", "x-message-ttl", "x-single-active-consumer"})


def converted_from_rabbitmq(exported: ForeignFile) -> ConversionView:
    """Return our file and the report. Raises Conflict."""
    if not _KNOWN & set(exported):
        raise Conflict(
            "the file has no queues, exchanges or users; export it with rabbitmqctl"
            " export_definitions"
        )
    check_texts(exported)
    conversion = _Conversion(exported)
    conversion.convert()
    return conversion.report.view()


@final
class _Conversion:
    """The conversion of one file."""

    def __init__(self, exported: ForeignFile) -> None:
        self.report = Report()
        self._exported = exported
        self._topics: dict[tuple[str, str], str] = {}  # by vhost and exchange
        self._kinds: dict[tuple[str, str], str] = {}  # of the same
        self._groups: dict[tuple[str, str], str] = {}  # by vhost and queue
        self._topics_of: defaultdict[str, set[str]] = defaultdict(set)  # by group
        self._users: dict[str, str] = {}  # by name in the file
        self._namespaces = _namespaces_of(exported)
        self._sorted_namespaces = sorted(self._namespaces)

    def convert(self) -> None:
        """Convert all objects; the later kinds need the names of the earlier ones."""
        for one in listed(self._exported, "vhosts"):
            self._convert_vhost(text(one, "name"))
        for one in listed(self._exported, "exchanges"):
            self._convert_exchange(one)
        bound = {
            (text(one, "vhost"), text(one, "destination"))
            for one in listed(self._exported, "bindings")
        }
        for one in listed(self._exported, "queues"):
            self._convert_queue(one, is_bound=(text(one, "vhost"), text(one, "name")) in bound)
        for one in listed(self._exported, "bindings"):
            self._convert_binding(one)
        self._convert_retentions()
        for one in listed(self._exported, "users"):
            self._convert_user(one)
        entries = ConvertedEntries(self._topics_of)
        for one in listed(self._exported, "permissions"):
            self._convert_permission(one, entries)
        for one in listed(self._exported, "policies"):
            keys = ", ".join(sorted(part(one, "definition"))) or "nothing"
            self.report.skipped(
                f"policy {text(one, 'name')}",
                f"a policy has a regular expression; set {keys} at each topic or group",
            )
        for field, value in self._exported.items():
            if field not in _KNOWN and isinstance(value, list):
                for one in listed(self._exported, field):
                    name = text(one, "name") or text(one, "user")
                    self.report.skipped(f"{field} {name}", "this kind has no equivalent")

    def _convert_vhost(self, name: str) -> None:
        if name == DEFAULT_VHOST:
            self.report.converted("vhost /", "names without a namespace")
        else:
            target = f"namespace {_namespace(name)}"
            self.report.changed(f"vhost {name}", target, "clients set the namespace")

    def _convert_exchange(self, one: Foreign) -> None:
        vhost, name = text(one, "vhost"), text(one, "name")
        kind, source = text(one, "type"), f"exchange {vhost} {name}"
        if not name or name.startswith("amq."):
            self.report.skipped(source, "an exchange that RabbitMQ makes itself")
            return
        if kind == "headers":
            self.report.skipped(source, "headers exchanges have no equivalent: use a SQL filter")
            return
        try:
            own, renamed = own_topic(_prefixed(vhost, _bare(name)))
        except ServiceError as error:
            self.report.skipped(source, reason_of(error))
            return
        reasons = [renamed, _separator_reason(name)]
        if kind == "topic":
            reasons.append("a tag has no wildcards: bindings with * or # are skipped")
        if text(part(one, "arguments"), "alternate-exchange"):
            reasons.append("there is no alternate exchange: a topic keeps unread messages")
        if own in self.report.objects["topics"]:
            self.report.skipped(source, f"another exchange became the topic {own} already")
            return
        is_delayed = kind == _DELAYED
        delayed_kind = text(part(one, "arguments"), "x-delayed-type")
        self._kinds[vhost, name] = delayed_kind if is_delayed else kind
        self._topics[vhost, name] = own
        self.report.objects["topics"][own] = {"messageType": "DELAY"} if is_delayed else {}
        self.report.changed(source, f"topic {own}", *reasons)

    def _convert_queue(self, one: Foreign, *, is_bound: bool) -> None:
        vhost, name = text(one, "vhost"), text(one, "name")
        source, given = f"queue {vhost} {name}", part(one, "arguments")
        try:
            own, renamed = own_group(_prefixed(vhost, _bare(name)))
        except ServiceError as error:
            self.report.skipped(source, reason_of(error))
            return
        if own in self.report.objects["groups"]:
            self.report.skipped(source, f"another queue became the group {own} already")
            return
        settings, reasons = _group_of(given)
        target = f"group {own}"
        if not is_bound:
            # The default exchange routes by the name of the queue.
            self.report.objects["topics"].setdefault(own, {})
            self._topics_of[own].add(own)
            target = f"topic {own} and group {own}"
            reasons.append(f"it has no binding: producers send to the topic {own}")
        self._groups[vhost, name] = own
        self.report.objects["groups"][own] = settings
        self.report.changed(source, target, renamed, _separator_reason(name), *reasons)

    def _convert_binding(self, one: Foreign) -> None:
        vhost, exchange = text(one, "vhost"), text(one, "source")
        destination, key = text(one, "destination"), text(one, "routing_key")
        source = f"binding {vhost} {exchange} -> {destination} {key}".rstrip()
        group = self._groups.get((vhost, destination))
        topic = self._topics.get((vhost, exchange))
        if text(one, "destination_type") == "exchange":
            self.report.skipped(source, "a topic does not feed another topic: send to both")
        elif not exchange and group is not None:
            self.report.objects["topics"].setdefault(group, {})
            self._topics_of[group].add(group)
            self.report.changed(source, f"topic {group}", "producers send to the topic by its name")
        elif topic is None or group is None:
            missing = "exchange" if topic is None else "queue"
            self.report.skipped(source, f"its {missing} was not converted")
        elif "*" in key or "#" in key:
            self.report.skipped(source, "a tag has no wildcards: use a SQL filter, or several tags")
        else:
            self._topics_of[group].add(topic)
            kind = self._kinds[vhost, exchange]
            if kind == "fanout" or not key:
                self.report.converted(source, f"group {group} subscribes to topic {topic}")
            elif _TAG.fullmatch(key):
                self.report.converted(
                    source, f"group {group} subscribes to topic {topic} with the tag {key}"
                )
            else:
                self.report.skipped(source, "the routing key has characters that no tag has")

    def _convert_retentions(self) -> None:
        """Set the retention of topics of queues with a time to live; the longest one wins."""
        ttls_ms: dict[str, int] = {}  # by group
        for one in listed(self._exported, "queues"):
            ttl_ms = number(part(one, "arguments"), "x-message-ttl")
            group = self._groups.get((text(one, "vhost"), text(one, "name")))
            if ttl_ms is not None and group is not None:
                own_ms, _ = retention_of(ttl_ms)
                ttls_ms[group] = max(ttls_ms.get(group, 0), own_ms)
        for group, own_ms in ttls_ms.items():
            for topic in self._topics_of[group]:
                settings = self.report.objects["topics"][topic]
                known_ms = settings.get("retention", {}).get("ms", 0)
                settings["retention"] = {"ms": max(known_ms, own_ms)}

    def _convert_user(self, one: Foreign) -> None:
        name = text(one, "name")
        source = f"user {name}"
        own, renamed = own_user(name)
        if not own:
            self.report.skipped(source, "it has no name")
            return
        if own in self.report.objects["users"]:
            self.report.skipped(source, f"another user became the user {own} already")
            return
        tags = one.get("tags", "")
        if not isinstance(tags, str | list):
            raise Conflict(f"'tags' of the user {name} is neither a text nor a list")
        words = tags.split(",") if isinstance(tags, str) else tags
        reasons = [renamed, f"its password is not portable: tidemill user rotate {own}"]
        if "administrator" in words:
            reasons.append(f"it was an administrator: tidemill user set {own} --type super")
        reasons.append("it is disabled")
        self._users[name] = own
        self.report.objects["users"][own] = {"enabled": False, "entries": []}
        self.report.changed(source, f"user {own}", *reasons)

    def _convert_permission(self, one: Foreign, entries: ConvertedEntries) -> None:
        vhost, name = text(one, "vhost"), self._users.get(text(one, "user"))
        source = f"permission of {text(one, 'user')} on {vhost}"
        if name is None:
            self.report.skipped(source, "its user was not converted")
            return
        own = self.report.objects["users"][name]["entries"]
        strange, foreign, is_whole = [], [], True
        for field, resource, actions in (
            ("write", "Topic", ("Pub", "Get")),
            ("read", "Group", ("Sub", "Get")),
            ("configure", "Topic", ("Create", "Update", "Delete")),
            ("configure", "Group", ("Create", "Update", "Delete")),
        ):
            pattern = text(one, field)
            names = _names_of(vhost, pattern)
            if names is None:
                strange.append(f"{field} {pattern}")
            elif names and self._has_other_vhosts(vhost, names):
                foreign.append(f"{field} {pattern}")
            elif names:
                if field == "read":
                    is_whole = entries.let_read(name, own, names) and is_whole
                is_whole = entries.add(name, own, f"{resource}:{names}", *actions) and is_whole
        reasons = []
        if strange:
            reasons.append(f"only ^NAME$, ^BEGIN.* and .* are converted, not {', '.join(strange)}")
        if foreign:
            skipped = ", ".join(dict.fromkeys(foreign))
            reasons.append(f"{skipped} would match names of other vhosts here: name topics instead")
        if not is_whole:
            reasons.append(entries.reason)
        self.report.changed(source, f"entries of {name}", *reasons)

    def _has_other_vhosts(self, vhost: str, names: str) -> bool:
        """Whether the names of a permission match the namespace of another vhost."""
        if vhost not in {DEFAULT_VHOST, ""}:
            return self._namespaces[_namespace(vhost)] > 1
        if not names.endswith("*"):
            return False
        begin = names.removesuffix("*")
        first = bisect_left(self._sorted_namespaces, begin)
        return any(each.startswith(begin) for each in self._sorted_namespaces[first : first + 1])


def _namespaces_of(exported: ForeignFile) -> Counter[str]:
    """Return the namespaces of all vhosts but the default one, and how many vhosts have each."""
    vhosts = {text(one, "name") for one in listed(exported, "vhosts")}
    for field in ("exchanges", "queues", "permissions"):
        vhosts |= {text(one, "vhost") for one in listed(exported, field)}
    return Counter(map(_namespace, vhosts - {DEFAULT_VHOST, ""}))


def _prefixed(vhost: str, name: str) -> str:
    return name if vhost in {DEFAULT_VHOST, ""} else f"{_namespace(vhost)}%{name}"


def _bare(name: str) -> str:
    """Return a name without %, which would put it into a namespace, that of another vhost."""
    return name.replace(NAMESPACE_SEPARATOR, "-")


def _separator_reason(name: str) -> str:
    bare = _bare(name)
    return "" if bare == name else f"% ends a namespace, so {name} is {bare}"


def _namespace(vhost: str) -> str:
    return _STRANGE.sub("-", vhost)


def _names_of(vhost: str, pattern: str) -> str | None:
    """Return the names of a permission: "", NAME, BEGIN* or *; None: it is another pattern."""
    if not pattern or pattern == "^$":
        return ""
    if pattern in _ALL:
        return _prefixed(vhost, "*")
    if found := _LITERAL.fullmatch(pattern):
        return _prefixed(vhost, found.group(1))
    if found := _BEGIN.fullmatch(pattern):
        return _prefixed(vhost, f"{found.group(1)}*")
    return None


def _group_of(arguments: Foreign) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a consumer group from the arguments of a queue, and the changes."""
    settings: dict[str, Any] = {}
    reasons = []
    limit = number(arguments, "x-delivery-limit")
    if limit is not None and limit >= 0:
        settings["maxAttempts"] = min(limit + 1, ATTEMPTS_MAX)
    if arguments.get("x-single-active-consumer"):
        settings["deliveryOrder"] = "FIFO"
        reasons.append(
            "a single active consumer becomes a FIFO group: messages of one message group are"
            " delivered in order, to any of its consumers"
        )
    ttl_ms = number(arguments, "x-message-ttl")
    if ttl_ms is not None:
        reasons.append(f"its time to live of {ttl_ms} ms is the retention of its topics, for all")
        reasons.append(retention_of(ttl_ms)[1])
    if "x-dead-letter-exchange" in arguments:
        reasons.append("its dead letters are in tidemill dead-letter list, not in an exchange")
    if "x-max-priority" in arguments:
        reasons.append("priorities are of a topic: set its type to PRIORITY")
    told = {"x-dead-letter-exchange", "x-dead-letter-routing-key", "x-max-priority"}
    others = sorted(set(arguments) - _NEEDLESS - _CONVERTED - told)
    if others:
        reasons.append(f"{', '.join(others)} has no equivalent")
    return settings, reasons
