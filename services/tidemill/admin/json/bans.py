"""The JSON of bans."""

from __future__ import annotations

from typing import TypeAlias

from pydantic import Field, StrictBool, StrictInt

from tidemill.admin.json.schema import NEXT_PAGE, AnyCaseEnum, Schema, Text
from tidemill.admin.json.security import Source, SubjectName
from tidemill.security.bans import REASON_CHARS_MAX

YEAR_MS = 365 * 86_400_000


class BanKindView(AnyCaseEnum):
    """The kind of a banned subject."""

    USER = "user"
    CLIENT = "client"
    ADDRESS = "address"


class BanTerms(Schema):
    """The terms of a ban, without its subject."""

    for_ms: StrictInt | None = Field(
        None, ge=1, le=10 * YEAR_MS, description="Time until the ban ends. Default: no end."
    )
    reason: Text = Field(
        "", max_length=REASON_CHARS_MAX, description="The reason, which only operators see."
    )
    force: StrictBool = Field(
        default=False, description="Ban also the user or the address of this request."
    )
    if_version: StrictInt | None = Field(
        None, ge=0, description="Change the ban only if it has this version; 0: only if it is new."
    )


class UserBanSettings(BanTerms):
    """A ban of a user."""

    user: SubjectName = Field(description="Name of the user.")


class ClientBanSettings(BanTerms):
    """A ban of a client id."""

    client_id: Text = Field(
        min_length=1, max_length=255, description="Id of the client, of all users."
    )


class AddressBanSettings(BanTerms):
    """A ban of addresses."""

    address: Source = Field(
        description="An address or a range in CIDR notation.", examples=["10.1.0.0/16"]
    )


BanSettings: TypeAlias = UserBanSettings | ClientBanSettings | AddressBanSettings


class BanView(Schema):
    """A ban."""

    name: str = Field(description="Name of the ban, for its path.")
    kind: BanKindView = Field(description="Kind of the subject.")
    value: str = Field(description="Name of the user, id of the client, or range of addresses.")
    until_ms: int = Field(description="End of the ban, ms since 1970; 0: no end.")
    ended: bool = Field(description="Whether the ban has ended.")
    reason: str = Field(description="The reason, for operators.")
    of_deleted_user: bool = Field(
        description="Whether its user was deleted. The ban does not apply to a later user of the"
        " name."
    )
    version: int = Field(description="Version of the security items with its last change.")
    created_at_ms: int = Field(description="Time of its creation, ms since 1970.")
    changed_at_ms: int = Field(description="Time of its last change, ms since 1970.")
    changed_by: str = Field(description="The caller of the last change.")


class BanPageView(Schema):
    """A page of bans."""

    bans: list[BanView] = Field(description="Bans by name.")
    next_page_token: str | None = NEXT_PAGE


class BanDeletionView(Schema):
    """A deleted ban, or one that would be deleted."""

    dry_run: bool = Field(description="Whether nothing has changed.")
    ban: BanView = Field(description="The ban before the deletion.")
