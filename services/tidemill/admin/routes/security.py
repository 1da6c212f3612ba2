"""The security mode, and decisions about one action of one user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from tidemill.admin.cluster.security_client import FoundItem, Item, SecurityClient
from tidemill.admin.cluster.security_states import SecurityStates, find_states
from tidemill.admin.json.security import (
    AccessAnswer,
    AccessQuestion,
    DecisionView,
    EntryView,
    ModeView,
    ProxySecurityView,
    SecuritySettingsView,
    SecurityView,
)
from tidemill.admin.routes import Access, Caller, ChangeAuthor, Cluster, DryRun, SecurityItems
from tidemill.common.clock import Clock, SystemClock
from tidemill.common.errors import BadRequest, Conflict, UserNotFound
from tidemill.security.acl import (
    ALLOW,
    DENY,
    AccessEntry,
    Action,
    Resource,
    ResourceType,
    Subject,
    parse_actions,
    parse_address,
    parse_entry,
    parse_resource,
)
from tidemill.security.identities import User, UserType, user_of
from tidemill.security.rights import Verdict, find_verdict
from tidemill.security.secret_keys import SecretKeys
from tidemill.security.table import (
    MODE,
    ROLE,
    USER,
    Mode,
    SecurityTable,
    mode_item,
    parse_mode,
    sealing_key_of,
)

router = APIRouter(tags=["security"])

AREA = Resource(ResourceType.CLUSTER, "security")


def keys_of(request: Request) -> Callable[[], SecretKeys | None]:
    """Return the function that returns the keys of the process; None without a key file."""
    keys: Callable[[], SecretKeys | None] = request.app.state.secret_keys
    return keys


def floor_of(request: Request) -> Mode:
    """Return the least mode of the process."""
    floor: Mode = request.app.state.security_floor
    return floor


def clock_of() -> Clock:
    """Return the clock of changes."""
    return SystemClock()


Keys = Annotated[Callable[[], SecretKeys | None], Depends(keys_of)]
Floor = Annotated[Mode, Depends(floor_of)]
WallClock = Annotated[Clock, Depends(clock_of)]


@router.get("/security", response_model_exclude_none=True)
async def get_security(
    items: SecurityItems, cluster: Cluster, floor: Floor, keys: Keys
) -> SecurityView:
    """Show the mode, the keys of this process, and what each proxy has applied."""
    found = await items.find(MODE, "")
    states = await find_states(cluster)
    return _view_of(mode_of(found), floor, found.version, keys(), states)


@router.put("/security", response_model_exclude_none=True)
async def put_security(
    settings: SecuritySettingsView,
    items: SecurityItems,
    cluster: Cluster,
    caller: Caller,
    author: ChangeAuthor,
    floor: Floor,
    keys: Keys,
    dry_run: DryRun = False,
) -> SecurityView:
    """Set the mode. It holds for calls from the next moment on, without a restart.

    A mode other than `off` needs `security_key_file` at this process and at each proxy. The answer
    is 409 if one of them has no keys, because such a proxy serves no client.
    """
    mode = parse_mode(settings.mode.value)
    if mode is not Mode.OFF:
        _check_keys(mode, keys(), await find_states(cluster))

    def decide(found: FoundItem) -> list[Item]:
        if found.encoded and mode_of(found) is mode:
            return []
        return [mode_item(mode, sealing_key_of(found.encoded))]

    version = await items.change(
        MODE, "", decide, caller=caller, audit=author.of("Cluster:security"), dry_run=dry_run
    )
    return _view_of(mode, floor, version, keys(), await find_states(cluster))


def _check_keys(mode: Mode, keys: SecretKeys | None, states: SecurityStates) -> None:
    """Raise Conflict if this process or a proxy that answered has no keys."""
    lacking = [] if keys is not None else ["this admin process"]
    lacking += [name for name, state in states.states if not state.key_ids]
    if lacking:
        raise Conflict(
            f"security_key_file is not set at {', '.join(lacking)}, and the mode {mode.text} needs"
            " it; set it there first. With the Helm chart, set security.mode instead"
        )


def _view_of(
    mode: Mode, floor: Mode, version: int, keys: SecretKeys | None, states: SecurityStates
) -> SecurityView:
    in_force = max(mode, floor)
    return SecurityView(
        mode=ModeView(mode.text),
        floor=ModeView(floor.text),
        in_force=ModeView(in_force.text),
        version=version,
        key_ids=[] if keys is None else keys.ids,
        proxies=[
            ProxySecurityView(
                name=name,
                version=state.version,
                mode=ModeView(state.mode),
                key_ids=list(state.key_ids),
                open_port=state.has_open_port,
            )
            for name, state in states.states
        ],
        unreachable=list(states.unreachable) or None,
    )


@router.post("/access:check", response_model_exclude_none=True)
async def check_access(
    question: AccessQuestion, items: SecurityItems, access: Access
) -> AccessAnswer:
    """Decide about one action of a user, and name the entry that decides.

    A user may ask about itself. Other questions need Get on `Cluster:security`.
    """
    if not access.is_own(question.user):
        access.require(Action.GET, AREA)
    actions = parse_actions([question.action])
    if len(actions) != 1:
        raise BadRequest("name one action, such as Pub")
    [action] = actions
    resource = parse_resource(question.resource)
    address = parse_address(question.address) if question.address else None
    if question.address and address is None:
        raise BadRequest(f"{question.address!r} is no address")
    user, subjects = await _subjects_of(items, question.user)
    wanted = f"{action.text} on {resource}"
    if user.type is UserType.SUPER:
        verdict = Verdict(is_allowed=True)
        reason = f"{user.subject} is a super user"
    else:
        verdict = find_verdict(subjects, action, resource, address)
        verb = "allows" if verdict.is_allowed else "denies"
        reason = (
            f"no entry of {user.subject} or its roles matches {wanted}"
            if verdict.entry is None
            else f"{verdict.subject} {verb} {wanted}"
        )
    if not user.is_enabled:
        reason = f"{user.subject} is disabled"
    return AccessAnswer(
        allowed=verdict.is_allowed and user.is_enabled,
        reason=reason,
        subject=verdict.subject or None,
        entry=_entry_of(verdict),
    )


async def _subjects_of(items: SecurityClient, name: str) -> tuple[User, list[Subject]]:
    """Return a user, and its entries with those of its roles. Raises UserNotFound."""
    encoded = (await items.find(USER, name)).encoded
    if encoded is None:
        raise UserNotFound(f"there is no user {name!r}")
    user = user_of(encoded)
    found = {role: (await items.find(ROLE, role)).encoded for role in user.roles}
    return user, SecurityTable(lambda _kind, role: found.get(role)).subjects_of(user)


def mode_of(found: FoundItem) -> Mode:
    """Return the mode in an item."""
    return SecurityTable(lambda _kind, _name: found.encoded).recorded_mode


def _entry_of(verdict: Verdict) -> EntryView | None:
    return None if verdict.entry is None else entry_views([verdict.entry])[0]


def entries_of(views: Sequence[EntryView]) -> tuple[AccessEntry, ...]:
    """Read entries. Raises BadRequest."""
    return tuple(
        [
            parse_entry(
                view.resource,
                view.actions,
                sources=view.sources,
                is_allowed=view.decision.value == ALLOW,
            )
            for view in views
        ]
    )


def entry_views(entries: Sequence[AccessEntry]) -> list[EntryView]:
    """Return entries as the API shows them."""
    return [
        EntryView(
            resource=entry.resource,
            actions=entry.to_item()["actions"],
            sources=list(entry.sources),
            decision=DecisionView(ALLOW if entry.is_allowed else DENY),
        )
        for entry in entries
    ]
