"""The right of a PUT, which creates a topic or consumer group, or changes it.

The home decides which of them it is, in the round of the change. So the request names what its
caller may do, and a topic that appears meanwhile does not change the needed right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tidemill.common.errors import AlreadyExists, GroupNotFound, TopicNotFound
from tidemill.security.acl import Action
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.admin.http.request_access import RequestAccess
    from tidemill.security.acl import Resource

_EITHER: Final = (Action.CREATE, Action.UPDATE)


def allowed_existence(
    access: RequestAccess, resource: Resource, *, is_new: bool
) -> pb.Existence.ValueType:
    """Return whether the resource may, must or must not exist. Raises Forbidden.

    `is_new`: the request may only create it.
    """
    if is_new:
        access.require(Action.CREATE, resource)
        return pb.EXISTENCE_MUST_BE_NEW
    access.require(_EITHER, resource)
    if not access.allows(Action.CREATE, resource):
        return pb.EXISTENCE_MUST_EXIST
    if not access.allows(Action.UPDATE, resource):
        return pb.EXISTENCE_MUST_BE_NEW
    return pb.EXISTENCE_UNSPECIFIED


@contextlib.contextmanager
def existence_refusals(access: RequestAccess, resource: Resource) -> Iterator[None]:
    """Report a refusal by the existence of the resource as the missing right. Raises Forbidden."""
    try:
        yield
    except AlreadyExists:
        access.require(Action.UPDATE, resource)
        raise
    except (TopicNotFound, GroupNotFound):
        access.require(Action.CREATE, resource)
        raise


def note_put(access: RequestAccess, resource: Resource, *, is_new: bool) -> None:
    """Note a right that an applied change lacked: the mode permissive lets it pass."""
    access.require(Action.CREATE if is_new else Action.UPDATE, resource)
