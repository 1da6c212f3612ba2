"""The rights that each call of the REST API needs in the mode `on`: one row per operation.

A request needs all rights of its row. `Get Topic:{topic}` is an action on the resource of a path
parameter, and `Get Cluster:clients` on an area; of `Create|Update` one suffices. A FILTERED row
admits any user, and its route leaves out hidden items. An operation without a row needs a super
user. Routes check rights that need more than the path: of a PUT, and of the topic of a
timer or transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from fastapi import Request

from tidemill.admin.http.request_access import RequestAccess, access_of
from tidemill.security.acl import (
    Action,
    Resource,
    ResourceType,
    group_resource,
    parse_actions,
    topic_resource,
)


class NeededRight(NamedTuple):
    """One of some actions on a resource."""

    actions: tuple[Action, ...]
    type: ResourceType
    name: str  # of an area, or a path parameter in braces

    def resource_of(self, parameters: Mapping[str, object]) -> Resource:
        """Return the resource of a request."""
        if self.type is ResourceType.CLUSTER:
            return Resource(self.type, self.name)
        name = str(parameters[self.name.strip("{}")])
        return topic_resource(name) if self.type is ResourceType.TOPIC else group_resource(name)


class RightsRow(NamedTuple):
    """The rights of one operation."""

    needed: tuple[NeededRight, ...] = ()
    is_own_user: bool = False  # the user of the path needs no right
    is_super: bool = False


def needed_rights(*texts: str) -> tuple[NeededRight, ...]:
    """Return the rights of texts such as `Get Topic:{topic}`."""
    needed = []
    for text in texts:
        action, _, resource = text.partition(" ")
        type_, _, name = resource.partition(":")
        actions = tuple(parse_actions(action.split("|")))
        needed.append(NeededRight(actions, ResourceType[type_.upper()], name))
    return tuple(needed)


def _needs(*texts: str, is_own_user: bool = False) -> RightsRow:
    return RightsRow(needed_rights(*texts), is_own_user)


FILTERED: Final = RightsRow()
SUPER: Final = RightsRow(is_super=True)
OWN: Final = RightsRow(is_own_user=True, is_super=True)  # the user itself, or a super user

OWN_TOKENS: Final = RightsRow()  # any user; the route checks the user of the token
OWN_QUESTION: Final = RightsRow()  # any user; the route checks the user of the question

ROWS: Final[Mapping[str, RightsRow]] = {
    "GET /overview": FILTERED,
    "GET /topics": FILTERED,
    "GET /topics/{topic}": _needs("Get Topic:{topic}"),
    "PUT /topics/{topic}": _needs("Create|Update Topic:{topic}"),
    "DELETE /topics/{topic}": _needs("Delete Topic:{topic}"),
    "POST /topics/{topic}:purge": _needs("Delete Topic:{topic}"),
    "POST /topics/{topic}:spread": _needs("Update Topic:{topic}"),
    "POST /topics/{topic}/messages": _needs("Pub Topic:{topic}"),
    "POST /topics/{topic}/messages:batch": _needs("Pub Topic:{topic}"),
    # A search by key tells the key.
    "GET /topics/{topic}/messages": _needs("Get Topic:{topic}", "Sub Topic:{topic}"),
    "GET /topics/{topic}/messages/{message_id}": _needs("Get Topic:{topic}"),
    "GET /topics/{topic}/queues/{queue}/messages": _needs("Get Topic:{topic}"),
    "GET /topics/{topic}/dedup": _needs("Get Topic:{topic}"),
    # It tells whether a key is known, as a search by key.
    "GET /topics/{topic}/dedup/{key}": _needs("Get Topic:{topic}", "Sub Topic:{topic}"),
    "DELETE /topics/{topic}/dedup/{key}": _needs("Update Topic:{topic}"),
    "GET /messages/{message_id}/trace": FILTERED,
    "GET /groups": FILTERED,
    "GET /groups/{group}": _needs("Get Group:{group}"),
    "GET /groups/{group}/progress": _needs("Get Group:{group}"),
    "GET /groups/{group}/diagnosis": _needs("Get Group:{group}"),
    "GET /groups/{group}/scaling": _needs("Get Group:{group}"),
    "GET /groups/{group}/deliveries": _needs("Get Group:{group}"),
    "PUT /groups/{group}": _needs("Create|Update Group:{group}"),
    "DELETE /groups/{group}": _needs("Delete Group:{group}"),
    "POST /groups/{group}:pause": _needs("Update Group:{group}"),
    "POST /groups/{group}:resume": _needs("Update Group:{group}"),
    "POST /groups/{group}:resetOffset": _needs("Update Group:{group}"),
    "POST /groups/{group}:forgetPullOffsets": _needs("Update Group:{group}"),
    "POST /groups/{group}:releaseLock": _needs("Update Group:{group}"),
    "POST /groups/{group}/deliveries:release": _needs("Update Group:{group}"),
    "GET /dead-letters": FILTERED,
    "GET /dead-letters/summary": FILTERED,
    "GET /groups/{group}/dead-letters/{letter_id}": _needs("Get Group:{group}"),
    "POST /groups/{group}/dead-letters:replay": _needs("Update Group:{group}"),
    "POST /groups/{group}/dead-letters:discard": _needs("Update Group:{group}"),
    # The route checks Pub on the topic of a copy.
    "POST /groups/{group}/dead-letters/{letter_id}:copy": _needs("Update Group:{group}"),
    # The starter, or Get and Update on the processes; the routes check it.
    "GET /operations": FILTERED,
    "GET /operations/{operation_id}": FILTERED,
    "POST /operations/{operation_id}:cancel": FILTERED,
    # The parts that the caller may get; each change has the right of its own operation.
    "GET /definitions": FILTERED,
    "POST /definitions:apply": FILTERED,
    "POST /definitions:convert": FILTERED,
    "GET /events": FILTERED,  # Each watch has the right of its document.
    "GET /history": FILTERED,  # The route checks Get on the topic or group.
    "GET /timers": FILTERED,
    "GET /timers/histogram": FILTERED,  # The route checks the topic, or all topics.
    "GET /timers/{timer_id}": FILTERED,
    "POST /timers:cancel": FILTERED,
    "POST /timers:reschedule": FILTERED,
    "POST /timers:fire": FILTERED,
    "POST /timers/{timer_id}:cancel": FILTERED,
    "POST /timers/{timer_id}:reschedule": FILTERED,
    "POST /timers/{timer_id}:fire": FILTERED,
    "GET /transactions": FILTERED,
    "GET /transactions/{transaction_id}": FILTERED,
    "POST /transactions/{transaction_id}:commit": FILTERED,
    "POST /transactions/{transaction_id}:rollback": FILTERED,
    "POST /transactions/{transaction_id}:check": FILTERED,
    "POST /transactions/{transaction_id}:recover": FILTERED,
    "POST /transactions:recover": FILTERED,  # The body has the topic.
    "GET /clients": FILTERED,
    "GET /clients/{client_id}": FILTERED,
    "POST /clients/{client_id}:stack": _needs("Update Cluster:clients"),
    "POST /clients/{client_id}:verify": _needs("Update Cluster:clients"),
    "POST /clients/{client_id}:kick": _needs("Update Cluster:clients"),
    "GET /quotas": _needs("Get Cluster:quotas"),
    "GET /quotas/{kind}/{subject}": _needs("Get Cluster:quotas"),
    "PUT /quotas/{kind}/{subject}": _needs("Create|Update Cluster:quotas"),
    "DELETE /quotas/{kind}/{subject}": _needs("Delete Cluster:quotas"),
    "GET /bans": _needs("Get Cluster:clients"),
    "GET /bans/{ban}": _needs("Get Cluster:clients"),
    "POST /bans": _needs("Update Cluster:clients"),
    "DELETE /bans/{ban}": _needs("Update Cluster:clients"),
    "GET /broker-groups": _needs("Get Cluster:broker-groups"),
    "GET /broker-groups/{name}": _needs("Get Cluster:broker-groups"),
    "PUT /broker-groups/{name}": _needs("Create|Update Cluster:broker-groups"),
    "POST /broker-groups/{name}:drain": _needs("Update Cluster:broker-groups"),
    "DELETE /broker-groups/{name}": _needs("Delete Cluster:broker-groups"),
    "GET /replicas": _needs("Get Cluster:replicas"),
    "GET /replicas/{name}": _needs("Get Cluster:replicas"),
    "POST /replicas/{name}:transfer": _needs("Update Cluster:replicas"),
    "POST /replicas/{name}:drain": _needs("Update Cluster:replicas"),
    "POST /replicas/{name}:setMinInSync": _needs("Update Cluster:replicas"),
    "POST /replicas/{name}:replace": _needs("Update Cluster:replicas"),
    "DELETE /replicas/{name}": _needs("Delete Cluster:replicas"),
    "GET /processes": _needs("Get Cluster:processes"),
    "GET /processes/{process}": _needs("Get Cluster:processes"),
    "GET /processes/{process}/settings": _needs("Get Cluster:processes"),
    "PUT /processes/{process}/log-level": _needs("Update Cluster:processes"),
    "GET /slow-calls": _needs("Get Cluster:processes"),
    "POST /support-bundles": _needs("Get Cluster:processes", "Get Cluster:audit"),
    "GET /support-bundles/{operation_id}": _needs("Get Cluster:processes", "Get Cluster:audit"),
    "GET /storage": _needs("Get Cluster:broker-groups"),
    "GET /audit": _needs("Get Cluster:audit"),
    "GET /users": _needs("Get Cluster:security"),
    "GET /users/{user}": _needs("Get Cluster:security", is_own_user=True),
    "PUT /users/{user}": SUPER,
    "POST /users/{user}:rotate": OWN,
    "DELETE /users/{user}": SUPER,
    "GET /tokens": FILTERED,
    "GET /tokens/{token}": OWN_TOKENS,
    "POST /tokens": OWN_TOKENS,
    "DELETE /tokens/{token}": OWN_TOKENS,
    "GET /roles": _needs("Get Cluster:security"),
    "GET /roles/{role}": _needs("Get Cluster:security"),
    "PUT /roles/{role}": SUPER,
    "DELETE /roles/{role}": SUPER,
    "GET /security": _needs("Get Cluster:security"),
    "PUT /security": SUPER,
    "GET /security/keys": _needs("Get Cluster:security"),
    "POST /security:addKey": SUPER,
    "POST /security:encryptSecrets": SUPER,
    "GET /session": FILTERED,
    "POST /session": FILTERED,
    "DELETE /session": FILTERED,
    "POST /access:check": OWN_QUESTION,
}


def missing_right(access: RequestAccess, call: str, parameters: Mapping[str, str]) -> str:
    """Return the right that a call needs and its caller lacks, such as `Update on Group:billing`.

    "" if it lacks none, or if only the route of the call can tell.
    """
    row = ROWS.get(call, SUPER)
    if not access.is_limited or (row.is_own_user and access.is_own(parameters.get("user", ""))):
        return ""
    for needed in row.needed:
        resource = needed.resource_of(parameters)
        if not access.allows(needed.actions, resource):
            return f"{' or '.join(action.text for action in needed.actions)} on {resource}"
    return "a super user" if row.is_super else ""


async def check_rights(request: Request) -> None:
    """Check the row of the matched route. Raises Forbidden."""
    route = request.scope["route"]
    row = ROWS.get(f"{request.method} {route.path_format}", SUPER)
    _check(access_of(request), row, request.path_params)


def _check(access: RequestAccess, row: RightsRow, parameters: Mapping[str, object]) -> None:
    if row.is_own_user and access.is_own(str(parameters["user"])):
        return
    if row.is_super:
        access.require_super()
    for right in row.needed:
        access.require(right.actions, right.resource_of(parameters))
