"""The rights that each method needs in the mode `on`: one row per method, as for REST.

`Get Topic:{topic}` is an action on the topic of the request. If a request leaves out an optional
topic or group, the right on it is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.admin.http.rights import needed_rights
from tidemill.security.acl import Action, topic_resource

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tidemill.admin.http.request_access import RequestAccess
    from tidemill.admin.http.rights import NeededRight


class MethodRow(NamedTuple):
    """The rights of one method, and whether it changes something."""

    needed: tuple[NeededRight, ...]
    is_optional: bool = False  # whether the names in its rights are optional fields


def _needs(*texts: str, is_optional: bool = False) -> MethodRow:
    return MethodRow(needed_rights(*texts), is_optional)


ROWS: Final[Mapping[str, MethodRow]] = {
    "ChangeLogLevel": _needs("Update Cluster:clients"),
    "DescribeTopicStatus": _needs("Get Topic:{topic}"),
    "ListSubscription": _needs("Get Topic:{topic}", "Get Group:{group}", is_optional=True),
    "DescribeSubscription": _needs(
        "Get Cluster:clients", "Get Topic:{topic}", "Get Group:{group}", is_optional=True
    ),
    "DeleteSubscription": _needs("Delete Group:{group}"),
    "DescribeGroupAccumulation": _needs("Get Group:{group}"),
    "ListConsumerConnection": _needs("Get Cluster:clients"),
    "ResetGroupOffset": _needs("Update Group:{group}"),
    "QueryMessage": _needs("Get Topic:{topic}"),
    "PrintThreadStackTrace": _needs("Update Cluster:clients"),
    "VerifyMessage": _needs("Update Cluster:clients", "Sub Topic:{topic}"),
    "AdminSendMessage": _needs("Pub Topic:{topic}"),
    "GetConsumerRunningInfo": _needs("Get Cluster:clients"),
    "GetTopicRoute": _needs("Get Topic:{topic}"),
    "QueryTimeSpan": _needs("Get Group:{group}"),
    "GetProxyRuntimeStats": _needs("Get Cluster:clients"),
}


def check_rights(
    access: RequestAccess, method: str, request: Message, names: Mapping[str, str]
) -> None:
    """Check the row of a method. `names` has the topic and group of the request.

    Raises Forbidden.
    """
    for right in ROWS[method].needed:
        field = right.name.strip("{}")
        if field == right.name or field in names:
            access.require(right.actions, right.resource_of(names))
    # A search by key tells the key.
    if method == "QueryMessage" and request.WhichOneof("search_key") == "message_key":
        access.require(Action.SUB, topic_resource(names["topic"]))
