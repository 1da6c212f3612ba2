"""The JSON of login sessions."""

from __future__ import annotations

from pydantic import Field

from tidemill.admin.json.schema import Schema
from tidemill.admin.json.security import ModeView


class SessionView(Schema):
    """The caller of a request."""

    user: str | None = Field(None, description="Name of the verified user. Missing: none.")
    via: str | None = Field(
        None,
        description="Kind of the credential: `basic`, `session`, `token:NAME`, or `token-file`.",
    )
    is_super: bool = Field(description="Whether the caller may do everything.")
    super_credentials: bool = Field(
        description="Whether the credentials are those of a super user. The mode `off` checks no"
        " credentials except the token of `admin_token_file`."
    )
    mode: ModeView = Field(description="The security mode in force.")
    hidden: list[str] | None = Field(
        None,
        description="Objects that the caller may not see, or only in part: `broker groups`,"
        " `consumer groups` and `topics`. Missing: it may see all.",
    )
    ends_at_ms: int | None = Field(
        None, description="End of the session without another request, ms since 1970."
    )
