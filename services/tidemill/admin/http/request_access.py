"""The rights of one request. `identities.py` makes the object, and routes ask it about rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, final

from fastapi import Request

from tidemill.common.errors import Forbidden
from tidemill.message.client_key import NO_OWNER
from tidemill.message.resource_names import BROKER_DEAD_LETTER_TOPICS
from tidemill.security.acl import (
    Action,
    Resource,
    ResourceType,
    group_resource,
    parse_address,
    topic_resource,
)
from tidemill.security.identities import NEEDS_SUPER, User
from tidemill.security.table import KnownUser, Mode

if TYPE_CHECKING:
    from starlette.types import Scope

    from tidemill.admin.http.sessions import Session
    from tidemill.security.identities import SealedSecret

READS: Final = (Action.GET, Action.LIST)  # one of them suffices for a row of a list
_CLIENTS: Final = Resource(ResourceType.CLUSTER, "clients")
_BROKER_DEAD_LETTERS: Final = frozenset(
    Resource(ResourceType.TOPIC, name) for name in BROKER_DEAD_LETTER_TOPICS
)


class RefusalNotes(Protocol):
    """The receiver of requests without a right."""

    def note_missing_right(self, reason: str, actions: str, resource: str, *, passes: bool) -> None:
        """Note a missing right; the request `passes` in the mode permissive."""


@final
@dataclass(frozen=True, slots=True)
class RequestAccess:
    """The user of a request, and the mode at its begin."""

    mode: Mode
    is_super: bool  # also the caller with the token of admin_token_file
    known: KnownUser | None = None  # None: no user, or the caller with the token
    address: str = ""
    notes: RefusalNotes | None = None
    secret: SealedSecret | None = None  # that the request shows; none in its session
    session: Session | None = None

    @property
    def user(self) -> str:
        """The name of the user; "": none."""
        return "" if self.known is None else self.known.user.name

    @property
    def user_id(self) -> int:
        """The id of the user; NO_OWNER: none."""
        return NO_OWNER if self.known is None else self.known.user.id

    def is_own(self, user: str) -> bool:
        """Whether the caller is this user with its secret; a token is not enough (ADR 0075)."""
        return self.known is not None and not self.known.via and self.user == user

    @property
    def is_limited(self) -> bool:
        """Whether rows, fields or changes of this request may be refused."""
        return self.mode is Mode.ON and not self.is_super

    @property
    def client_owner(self) -> int:
        """The owner of the clients that the caller may see; NO_OWNER: it may see all clients."""
        if self.known is None or self.allows(Action.GET, _CLIENTS):
            return NO_OWNER
        return self.known.user.id

    def allows(self, actions: Action | Sequence[Action], resource: Resource) -> bool:
        """Whether one of the actions is allowed. It is always, except in the mode `on`."""
        return not self.is_limited or self._decides(_tuple(actions), resource)

    def allows_topic(self, actions: Action | Sequence[Action], topic: str) -> bool:
        """Whether one of the actions is allowed on a topic."""
        return not self.is_limited or self._decides(_tuple(actions), topic_resource(topic))

    def allows_group(self, actions: Action | Sequence[Action], group: str) -> bool:
        """Whether one of the actions is allowed on a consumer group."""
        return not self.is_limited or self._decides(_tuple(actions), group_resource(group))

    def allows_all(self, actions: Sequence[Action], type_: ResourceType) -> bool:
        """Whether one of the actions is allowed on each resource of a type."""
        known = self.known
        if not self.is_limited or known is None:
            return not self.is_limited
        return any(known.allows_all(each, type_, self._find_address) for each in actions)

    def require(self, actions: Action | Sequence[Action], resource: Resource) -> None:
        """Check that one of the actions is allowed. Raises Forbidden."""
        wanted = _tuple(actions)
        if self.mode is Mode.OFF or self.is_super or self._decides(wanted, resource):
            return
        texts = " or ".join(action.text for action in wanted)
        self.refuse(f"may not {texts} on {resource}", texts, str(resource))

    def require_all_topics(self, action: Action) -> None:
        """Check that an action is allowed on all topics. Raises Forbidden."""
        known = self.known
        if self.mode is Mode.OFF or self.is_super:
            return
        if known is None or not known.allows_all(action, ResourceType.TOPIC, self._find_address):
            self.refuse(f"may not {action.text} on all topics; name one", action.text, "Topic:*")

    def require_super(self) -> None:
        """Check that the user is a super user. Raises Forbidden."""
        if self.mode is not Mode.OFF and not self.is_super:
            self.refuse(f"may not do this, because {NEEDS_SUPER},")

    def check_same(self, user: User) -> None:
        """Check that a user of the caller's name is the caller. Raises Forbidden.

        A user that was created again has another id, and the copy of the caller is some time old.
        """
        own = None if self.known is None else self.known.user
        if self.mode is Mode.ON and own and own.name == user.name and own.id != user.id:
            self.refuse("was deleted")

    def refuse(self, reason: str, actions: str = "", resource: str = "") -> None:
        """Note a missing right. Raises Forbidden in the mode `on`."""
        caller = f"user {self.user}" if self.user else "a request without a user"
        text = f"{caller} {reason} from {self.address}"
        passes = self.mode is not Mode.ON
        if self.notes is not None:
            self.notes.note_missing_right(text, actions, resource, passes=passes)
        if not passes:
            raise Forbidden(text)

    def _decides(self, actions: tuple[Action, ...], resource: Resource) -> bool:
        known = self.known
        if known is None:
            return False

        def decides(action: Action) -> bool:
            if resource in _BROKER_DEAD_LETTERS:
                # Their messages are of all topics.
                return known.allows_all(action, ResourceType.TOPIC, self._find_address)
            return known.decide(action, resource, self._find_address)

        return any(map(decides, actions))

    def _find_address(self) -> SourceAddress | None:
        return parse_address(self.address)


if TYPE_CHECKING:
    from tidemill.security.acl import SourceAddress

OPEN: Final = RequestAccess(Mode.OFF, is_super=False)


def user_access(
    mode: Mode,
    known: KnownUser,
    *,
    address: str,
    notes: RefusalNotes | None = None,
    secret: SealedSecret | None = None,
    session: Session | None = None,
) -> RequestAccess:
    """Return the access of a request with a verified user."""
    return RequestAccess(
        mode,
        is_super=known.is_super,
        known=known,
        address=address,
        notes=notes,
        secret=secret,
        session=session,
    )


def set_access(scope: Scope, access: RequestAccess) -> None:
    """Store the access in the state of a request."""
    scope.setdefault("state", {})["access"] = access


def access_of(request: Request) -> RequestAccess:
    """Return the access of a request.

    An application behind an identity check refuses requests that have not passed it.
    """
    access = getattr(request.state, "access", None)
    if isinstance(access, RequestAccess):
        return access
    if request.app.state.needs_identity:
        raise Forbidden("the identity of this request was not checked")
    return OPEN


def _tuple(actions: Action | Sequence[Action]) -> tuple[Action, ...]:
    return (actions,) if isinstance(actions, Action) else tuple(actions)
