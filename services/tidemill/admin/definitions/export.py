"""Read the definitions of a cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from pydantic import BaseModel

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.configuration import read_configuration
from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.admin.definitions.parsing import MODELS
from tidemill.admin.http.preconditions import EntityTag, config_tag
from tidemill.admin.http.request_access import RequestAccess
from tidemill.admin.json import render
from tidemill.admin.json.definitions import Definitions
from tidemill.admin.routes.quotas import view_of as quota_view
from tidemill.admin.routes.roles import view_of as role_view
from tidemill.admin.routes.users import view_of as user_view
from tidemill.common.errors import BrokerGroupUnreachable
from tidemill.common.slices import run_in_turns
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.security.identities import role_of, user_of
from tidemill.security.quotas import QUOTA, quota_of
from tidemill.security.table import ROLE, USER
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

Settings = dict[str, Any]
Definition = dict[str, Any]  # settings with a name, in JSON
Tags = dict[tuple[str, str], str]

SECURITY: Final = Resource(ResourceType.CLUSTER, "security")
QUOTAS: Final = Resource(ResourceType.CLUSTER, "quotas")
_LIMITS: Final = (
    "publishMessagesPerS",
    "publishBytesPerS",
    "dispatchMessagesPerS",
    "dispatchBytesPerS",
    "storedBytes",
    "pendingTimers",
)
_DEFAULT_POLICY: Final = {"firstCheckMs": 6_000, "periodMs": 30_000, "attempts": 15}


class CurrentDefinitions(NamedTuple):
    """The definitions of a cluster."""

    file: Definitions
    tags: Mapping[tuple[str, str], str]  # ETags by kind and name, as the REST API gives them
    text: str = ""  # the file in JSON

    @property
    def etag(self) -> str:
        """The ETag of the whole file: a hash of it."""
        return f'"{hashlib.blake2s(self.text.encode(), digest_size=8).hexdigest()}"'


@final
class _Objects:
    """The objects of one kind: their models, and their JSON."""

    def __init__(self, field: str) -> None:
        self.models: list[BaseModel] = []
        self.texts: list[str] = []
        self._model = MODELS[field]

    def add(self, definition: Definition) -> None:
        """Add one object."""
        one = self._model.model_validate(definition)
        self.models.append(one)
        shown = one.model_dump(mode="json", by_alias=True, exclude_unset=True)
        self.texts.append(json.dumps(shown, ensure_ascii=False, separators=(",", ":")))


async def read_definitions(
    cluster: Brokers, items: SecurityClient, access: RequestAccess
) -> CurrentDefinitions:
    """Return what the caller may get. A kind without the right is missing.

    Raises BrokerGroupUnreachable while the home is unreachable: copies of others may be older.
    """
    found = await read_configuration(cluster)
    if found.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(found.unreachable)} cannot be reached; definitions are read from the home"
        )
    listed: dict[str, Sequence[Any]] = {
        "topics": sorted(found.topics, key=lambda each: each.name),
        "groups": sorted(found.groups, key=lambda each: each.name),
    }
    if access.allows(Action.GET, SECURITY):
        listed["roles"] = [each async for each in items.all(ROLE)]
        listed["users"] = [each async for each in items.all(USER)]
    if access.allows(Action.GET, QUOTAS):
        listed["quotas"] = [each async for each in items.all(QUOTA)]
    objects: dict[str, _Objects] = {}
    tags: Tags = {}
    await run_in_turns(reading(listed, access, objects, tags))
    lists = [f'"{field}":[{",".join(one.texts)}]' for field, one in objects.items()]
    models = {field: one.models for field, one in objects.items()}
    file = Definitions().model_copy(update=models)
    return CurrentDefinitions(file, tags, f"{{{','.join(lists)}}}")


def reading(
    listed: Mapping[str, Sequence[Any]],
    access: RequestAccess,
    objects: dict[str, _Objects],
    tags: Tags,
) -> Iterator[None]:
    """Turn the objects that the caller may get into definitions with tags, one per step."""
    for field in MODELS:
        if field not in listed:
            continue
        found = objects.setdefault(field, _Objects(field))
        for one in listed[field]:
            read = _READERS[field](one, access)
            if read is not None:
                name, tag, definition = read
                tags[field, name] = tag
                found.add(definition)
            yield


_Read = tuple[str, str, Definition]  # name, ETag, and the definition


def _read_topic(topic: pb.TopicConfig, access: RequestAccess) -> _Read | None:
    if not access.allows_topic(Action.GET, topic.name):
        return None
    shown = render.topic_of(topic).model_dump(mode="json", by_alias=True)
    return topic.name, config_tag(topic).text, {"name": topic.name, **topic_settings(shown)}


def _read_group(group: pb.GroupConfig, access: RequestAccess) -> _Read | None:
    if not access.allows_group(Action.GET, group.name):
        return None
    shown = render.group_of(group).model_dump(mode="json", by_alias=True)
    return group.name, config_tag(group).text, {"name": group.name, **group_settings(shown)}


def _read_role(encoded: bytes, _access: RequestAccess) -> _Read:
    shown = role_view(role_of(encoded)).model_dump(mode="json", by_alias=True)
    name, tag = shown["name"], EntityTag(0, shown["version"]).text
    return name, tag, {"name": name, **role_settings(shown)}


def _read_user(encoded: bytes, _access: RequestAccess) -> _Read:
    shown = user_view(user_of(encoded)).model_dump(mode="json", by_alias=True)
    name, tag = shown["name"], EntityTag(shown["id"], shown["version"]).text
    return name, tag, {"name": name, **user_settings(shown)}


def _read_quota(encoded: bytes, _access: RequestAccess) -> _Read:
    view = quota_view(quota_of(encoded), is_former=False)
    shown = view.model_dump(mode="json", by_alias=True)
    kind, subject, tag = shown["kind"], shown["subject"], EntityTag(0, shown["version"]).text
    return f"{kind}/{subject}", tag, {"kind": kind, "subject": subject, **quota_settings(shown)}


_READERS: Final[dict[str, Callable[[Any, RequestAccess], _Read | None]]] = {
    "roles": _read_role,
    "users": _read_user,
    "topics": _read_topic,
    "groups": _read_group,
    "quotas": _read_quota,
}


def topic_settings(shown: Settings) -> Settings:
    """Return all settings of a topic from its document, the defaults included."""
    retention, dedup = shown.get("retention") or {}, shown.get("dedup")
    return {
        "messageType": shown["messageType"],
        "queues": shown["queues"],
        "deliverySpreadMs": shown.get("deliverySpreadMs") or 0,
        "retention": {
            "ms": retention.get("ms"),
            "bytes": retention.get("bytes"),
            "acked": retention.get("acked") or "keep",
        },
        "transaction": shown.get("transaction") or dict(_DEFAULT_POLICY),
        "dedup": dedup
        and {
            name: dedup.get(name)
            for name in ("windowMs", "keyFrom", "mode", "maxWaitMs", "memoryBytes")
        },
    }


def group_settings(shown: Settings) -> Settings:
    """Return all settings of a consumer group from its document."""
    retry = {name: policy for name, policy in shown["retry"].items() if policy is not None}
    names = ("deliveryOrder", "maxAttempts", "startFrom", "priorityFactor")
    return {**{name: shown.get(name) for name in names}, "retry": retry}


def role_settings(shown: Settings) -> Settings:
    """Return the settings of a role from its document."""
    return {"entries": shown["entries"]}


def user_settings(shown: Settings) -> Settings:
    """Return the settings of a user from its document."""
    names = ("type", "enabled", "entries", "roles", "serviceAccounts", "certificates")
    return {name: shown[name] for name in names}


def quota_settings(shown: Settings) -> Settings:
    """Return the limits of a quota from its document."""
    return {name: shown[name] for name in _LIMITS}
