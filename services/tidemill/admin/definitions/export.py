"""Read the definitions of a cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.configuration import read_configuration
from tidemill.admin.cluster.security_client import SecurityClient
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

    @property
    def etag(self) -> str:
        """The ETag of the whole file: a hash of it."""
        text = json.dumps(self.file.model_dump(mode="json", by_alias=True, exclude_unset=True))
        return f'"{hashlib.blake2s(text.encode(), digest_size=8).hexdigest()}"'


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
    wanted: dict[str, list[Definition]] = {"topics": [], "groups": []}
    tags: dict[tuple[str, str], str] = {}

    def configuration() -> Iterator[None]:
        for topic in sorted(found.topics, key=lambda each: each.name):
            if access.allows_topic(Action.GET, topic.name):
                shown = render.topic_of(topic).model_dump(mode="json", by_alias=True)
                wanted["topics"].append({"name": topic.name, **topic_settings(shown)})
                tags["topics", topic.name] = config_tag(topic).text
            yield
        for group in sorted(found.groups, key=lambda each: each.name):
            if access.allows_group(Action.GET, group.name):
                view = render.group_of(group).model_dump(mode="json", by_alias=True)
                wanted["groups"].append({"name": group.name, **group_settings(view)})
                tags["groups", group.name] = config_tag(group).text
            yield

    await run_in_turns(configuration())
    if access.allows(Action.GET, SECURITY):
        wanted["roles"] = [each async for each in _roles(items, tags)]
        wanted["users"] = [each async for each in _users(items, tags)]
    if access.allows(Action.GET, QUOTAS):
        wanted["quotas"] = [each async for each in _quotas(items, tags)]
    return CurrentDefinitions(Definitions.model_validate(wanted), tags)


async def _roles(items: SecurityClient, tags: Tags) -> AsyncIterator[Definition]:
    async for encoded in items.all(ROLE):
        shown = role_view(role_of(encoded)).model_dump(mode="json", by_alias=True)
        tags["roles", shown["name"]] = EntityTag(0, shown["version"]).text
        yield {"name": shown["name"], **role_settings(shown)}


async def _users(items: SecurityClient, tags: Tags) -> AsyncIterator[Definition]:
    async for encoded in items.all(USER):
        shown = user_view(user_of(encoded)).model_dump(mode="json", by_alias=True)
        tags["users", shown["name"]] = EntityTag(shown["id"], shown["version"]).text
        yield {"name": shown["name"], **user_settings(shown)}


async def _quotas(items: SecurityClient, tags: Tags) -> AsyncIterator[Definition]:
    async for encoded in items.all(QUOTA):
        view = quota_view(quota_of(encoded), is_former=False)
        shown = view.model_dump(mode="json", by_alias=True)
        name = f"{shown['kind']}/{shown['subject']}"
        tags["quotas", name] = EntityTag(0, shown["version"]).text
        yield {"kind": shown["kind"], "subject": shown["subject"], **quota_settings(shown)}


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
