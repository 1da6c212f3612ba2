"""The JSON of named tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictInt

from tidemill.admin.json.schema import NEXT_PAGE, ExclusiveSchema, Schema
from tidemill.admin.json.security import SubjectName
from tidemill.security.identities import ROLES_MAX
from tidemill.security.tokens import DURATION_MS_MAX

SHOWN_ONCE = "The token, shown once. Send it in the header `Authorization: Bearer`."


class TokenSettings(ExclusiveSchema):
    """A new token, with at most one kind of end."""

    at_most_one = ("expires_after_ms", "no_expiry")

    name: SubjectName = Field(description="Name, unique among the tokens of its user.")
    user: SubjectName | None = Field(None, description="User of the token. Default: the caller.")
    roles: list[SubjectName] | None = Field(
        None,
        max_length=ROLES_MAX,
        description="Roles that limit the token: its user and one of them must allow an action."
        " Default: all rights of the user.",
    )
    expires_after_ms: StrictInt | None = Field(
        None,
        ge=1,
        le=DURATION_MS_MAX,
        description="Time until the token ends, at most 400 days. Default: 90 days.",
    )
    no_expiry: Literal[True] | None = Field(None, description="The token never ends.")


class TokenView(Schema):
    """A token, without its secret."""

    id: str = Field(description="Its random id, the middle part of the token.")
    name: str = Field(description="Name, unique among the tokens of its user.")
    user: str = Field(description="User of the token.")
    roles: list[str] = Field(description="Roles that limit it; empty: all rights of the user.")
    not_after_ms: int = Field(description="End of its validity, ms since 1970; 0: none.")
    created_at_ms: int = Field(description="Time of its creation, ms since 1970.")
    changed_by: str = Field(description="The caller that created it.")
    version: int = Field(description="Version of the security items with its creation.")


class TokenCreationView(TokenView):
    """A new token, or one that would be created."""

    dry_run: bool = Field(description="Whether nothing has changed.")
    token: str | None = Field(None, description=SHOWN_ONCE)


class TokenPageView(Schema):
    """A page of tokens."""

    tokens: list[TokenView] = Field(description="Tokens by id.")
    next_page_token: str | None = NEXT_PAGE


class TokenDeletionView(Schema):
    """A deleted token, or one that would be deleted."""

    dry_run: bool = Field(description="Whether nothing has changed.")
    token: TokenView = Field(description="The token before the deletion.")
