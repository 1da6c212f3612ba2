"""Login sessions: log in, look at the caller, log out (ADR 0077)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response, status

from tidemill.admin.http.actor import Actor, actor_of
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.http.sessions import VIA_SESSION, Session, Sessions, find_cookie, set_cookie
from tidemill.admin.json.security import ModeView
from tidemill.admin.json.sessions import SessionView
from tidemill.admin.routes import Access
from tidemill.admin.routes.broker_groups import BROKER_GROUPS
from tidemill.common.errors import Conflict
from tidemill.security.acl import Action, ResourceType
from tidemill.security.table import Mode

router = APIRouter(tags=["security"])


def sessions_of(request: Request) -> Sessions:
    """Return the sessions of the application."""
    sessions = request.app.state.sessions
    assert isinstance(sessions, Sessions)
    return sessions


LoginSessions = Annotated[Sessions, Depends(sessions_of)]
Caller = Annotated[Actor, Depends(actor_of)]


@router.get("/session", response_model_exclude_none=True)
async def get_session(access: Access, actor: Caller) -> SessionView:
    """Show the caller."""
    return _view_of(access, actor.user, actor.via, access.session)


@router.post("/session", response_model_exclude_none=True)
async def begin_session(
    request: Request, response: Response, access: Access, sessions: LoginSessions
) -> SessionView:
    """Log in: set the cookie of a session for the user and secret of this request."""
    if access.mode is Mode.OFF:
        raise Conflict("the security mode is off, so a login has no effect")
    if access.known is None or access.secret is None:
        raise Conflict("log in with a user and its secret, in the header Authorization: Basic")
    session = sessions.begin(access.known.user, access.secret)
    response.headers["Set-Cookie"] = set_cookie(request.scope, sessions.encode(session))
    return _view_of(access, session.user, VIA_SESSION, session)


@router.delete("/session", status_code=status.HTTP_204_NO_CONTENT)
async def end_session(request: Request, response: Response, sessions: LoginSessions) -> None:
    """Log out: end the session of the cookie in this process, and delete the cookie."""
    cookie = find_cookie(request.scope)
    session = None if cookie is None else sessions.read(cookie)
    if session is not None:
        sessions.end(session)
    response.headers["Set-Cookie"] = set_cookie(request.scope, "")


def _hidden(access: RequestAccess) -> list[str]:
    """Return the kinds of objects that the caller may not see, or only in part."""
    seen = {
        "broker groups": access.allows(Action.GET, BROKER_GROUPS),
        "consumer groups": access.allows_all(READS, ResourceType.GROUP),
        "topics": access.allows_all(READS, ResourceType.TOPIC),
    }
    return [kind for kind, is_seen in seen.items() if not is_seen]


def _view_of(access: RequestAccess, user: str, via: str, session: Session | None) -> SessionView:
    return SessionView(
        user=user or None,
        via=via or None,
        is_super=access.mode is not Mode.ON or access.is_super,
        super_credentials=access.is_super,
        mode=ModeView(access.mode.text),
        hidden=_hidden(access) or None,
        ends_at_ms=None if session is None else session.ends_at_ms,
    )
