"""The JSON of users, roles, rights and the security mode."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt

from tidemill.admin.json.schema import DRY_RUN, NEXT_PAGE, AnyCaseEnum, Schema, Text
from tidemill.security.acl import ALL_ACTIONS, AREAS, ENTRIES_MAX, SOURCES_MAX, Action
from tidemill.security.identities import ACCOUNTS_MAX, CERTIFICATES_MAX, ROLES_MAX, UserType

# Patterns for the OpenAPI document; the rules of entries and names refuse others, with a reason.
NAME = "[A-Za-z0-9_|-][A-Za-z0-9_%|-]{0,100}"
_RESOURCE = rf"(Topic|Group):{NAME}|Cluster:({'|'.join(AREAS)})"
_PATTERN = rf"^(\*|(Topic|Group|Cluster):\*|(Topic|Group):{NAME}\*|{_RESOURCE})$"
_ACTIONS = [action.text for action in Action]

SubjectName = Annotated[Text, Field(json_schema_extra={"pattern": "^[A-Za-z0-9._@-]{1,64}$"})]
AccountName = Annotated[
    Text, Field(json_schema_extra={"pattern": "^[a-z0-9-]{1,63}/[a-z0-9.-]{1,253}$"})
]
CertificateName = Annotated[
    Text, Field(json_schema_extra={"pattern": "^[!-~]([ -~]{0,253}[!-~])?$"})
]
ActionName = Annotated[Text, Field(json_schema_extra={"enum": _ACTIONS})]
ActionOrAll = Annotated[Text, Field(json_schema_extra={"enum": [ALL_ACTIONS, *_ACTIONS]})]
ResourceName = Annotated[Text, Field(json_schema_extra={"pattern": f"^({_RESOURCE})$"})]
ResourcePattern = Annotated[Text, Field(json_schema_extra={"pattern": _PATTERN})]
Source = Annotated[Text, Field(json_schema_extra={"format": "cidr"})]
Address = Annotated[Text, Field(json_schema_extra={"format": "ip-address"})]
Secret = Annotated[Text, Field(json_schema_extra={"pattern": "^[!-~]{6,128}$"})]

SHOWN_ONCE = "The secret, shown once. Clients use it with the name of the user as access key."


class DecisionView(AnyCaseEnum):
    """Whether an entry allows or denies."""

    ALLOW = "ALLOW"
    DENY = "DENY"


class ModeView(AnyCaseEnum):
    """What happens to calls without credentials or without a right."""

    OFF = "off"
    PERMISSIVE = "permissive"
    ON = "on"


class EntryView(Schema):
    """One entry: actions on the resources of a pattern."""

    resource: ResourcePattern = Field(
        description="`Topic:NAME`, `Group:NAME`, `Cluster:AREA` or `*`. A name may be `*` or end"
        " with `*`.",
        examples=["Topic:orders*"],
    )
    actions: list[ActionOrAll] = Field(
        min_length=1,
        max_length=len(Action) + 1,
        description="`All`, or some of Pub, Sub, Create, Update, Delete, Get and List.",
        examples=[["Pub"]],
    )
    sources: list[Source] = Field(
        [],
        max_length=SOURCES_MAX,
        description="Addresses and ranges in CIDR notation of the clients; empty: all.",
        examples=[["10.1.0.0/16"]],
    )
    decision: DecisionView = Field(
        DecisionView.ALLOW, description="Among entries of the same rank, DENY wins."
    )


class SecretView(Schema):
    """A secret of a user, without the secret itself."""

    id: int = Field(description="Number among the secrets of the user.")
    key_id: str = Field(description="Id of the key that encrypts it.")
    created_at_ms: int = Field(description="Time of its creation, ms since 1970.")
    not_after_ms: int = Field(description="End of its validity, ms since 1970; 0: none.")
    used_at_ms: int | None = Field(
        None,
        description="Its last known use, ms since 1970. Missing in lists and after changes, and if"
        " no use since `usesSinceMs` is known.",
    )


class UserFields(Schema):
    """The settings of a user. A missing field does not change."""

    type: UserType | None = Field(None, description="SUPER may do everything. Default: NORMAL.")
    enabled: StrictBool | None = Field(None, description="Whether its credentials are valid.")
    entries: list[EntryView] | None = Field(
        None, max_length=ENTRIES_MAX, description="All entries of the user."
    )
    roles: list[SubjectName] | None = Field(
        None, max_length=ROLES_MAX, description="Names of all roles of the user."
    )
    service_accounts: list[AccountName] | None = Field(
        None,
        max_length=ACCOUNTS_MAX,
        description="All Kubernetes service accounts of the user, as NAMESPACE/NAME. Their tokens"
        " are credentials of the user. A service account has one user.",
    )
    certificates: list[CertificateName] | None = Field(
        None,
        max_length=CERTIFICATES_MAX,
        description="All certificates of the user, each by a URI name, a DNS name or the common"
        " name. If there are any, each call of the user must use one, also with a secret or a"
        " token. The REST API accepts no certificates, so it refuses such a user.",
    )


class UserSettings(UserFields):
    """A new user, or changes of one; fields that are missing stay."""

    secret: Secret | None = Field(
        None,
        description="The secret of a new user: 16 to 128 printable ASCII characters without blanks."
        " Default: a random one.",
    )
    allow_weak_secret: StrictBool = Field(
        False, description="Accept a secret of 6 characters or more, for imports from RocketMQ."
    )
    force: StrictBool = Field(
        False, description="Change also the user of this request, and the last super user."
    )
    if_version: StrictInt | None = Field(
        None, ge=0, description="Change the user only if it has this version; 0: only if it is new."
    )


class UserView(Schema):
    """A user."""

    name: str = Field(description="Name, which is the access key of clients.")
    id: int = Field(description="Number of this user. A later user of this name has another one.")
    type: UserType = Field(description="SUPER may do everything.")
    enabled: bool = Field(description="Whether its credentials are valid.")
    secrets: list[SecretView] = Field(description="At most two; both are valid.")
    entries: list[EntryView] = Field(description="Its own entries.")
    roles: list[str] = Field(description="Names of its roles.")
    service_accounts: list[str] = Field(description="Its Kubernetes service accounts.")
    certificates: list[str] = Field(description="Names of its certificates.")
    version: int = Field(description="Version of the security items with its last change.")
    created_at_ms: int = Field(description="Time of its creation, ms since 1970.")
    changed_at_ms: int = Field(description="Time of its last change, ms since 1970.")
    changed_by: str = Field(description="The caller of the last change.")


class ShownUserView(UserView):
    """A user with the last uses of its secrets."""

    uses_since_ms: int = Field(
        description="Time since which the uses of its secrets are known, ms since 1970: the latest"
        " start of a process that answered. Uses at processes that have ended are unknown."
    )
    unreachable: list[str] | None = Field(
        None, description="Processes whose uses are unknown. Missing if all answered."
    )


class UserPutView(UserView):
    """The user after a change."""

    is_new: bool = Field(description="Whether this call created the user.")
    secret: str | None = Field(None, description=SHOWN_ONCE)


class UserPageView(Schema):
    """A page of users."""

    users: list[UserView] = Field(description="Users by name.")
    next_page_token: str | None = NEXT_PAGE


class RotationSettings(Schema):
    """A new secret beside the present one."""

    retire_after_ms: StrictInt = Field(
        7 * 86_400_000,
        ge=0,
        le=400 * 86_400_000,
        description="Time until the present secret ends. Default: 7 days. 0: all others end now.",
    )
    force: StrictBool = Field(
        False, description="End the older one of two secrets now, although it is still valid."
    )


class UserDeletionView(Schema):
    """A deleted user, or one that would be deleted."""

    dry_run: bool = Field(description="Whether nothing has changed.")
    user: UserView = Field(description="The user before the deletion.")
    tokens: list[str] = Field(description="Names of its tokens, which are deleted with it.")


class RoleFields(Schema):
    """The entries of a role."""

    entries: list[EntryView] = Field(max_length=ENTRIES_MAX, description="All entries of the role.")


class RoleSettings(RoleFields):
    """The entries of a role."""

    if_version: StrictInt | None = Field(
        None, ge=0, description="Change the role only if it has this version; 0: only if it is new."
    )


class RoleView(Schema):
    """A named list of entries."""

    name: str = Field(description="Name of the role.")
    entries: list[EntryView] = Field(description="Its entries.")
    ready_made: bool = Field(description="Whether it is a part of Tidemill and cannot be changed.")
    version: int = Field(description="Version of the security items with its last change.")
    changed_at_ms: int = Field(description="Time of its last change, ms since 1970.")
    changed_by: str = Field(description="The caller of the last change.")


class RolePageView(Schema):
    """A page of roles, without the ready-made ones on later pages."""

    roles: list[RoleView] = Field(
        description="The ready-made roles first, then the others by name."
    )
    next_page_token: str | None = NEXT_PAGE


class RoleDeletionView(Schema):
    """A deleted role, or one that would be deleted."""

    dry_run: bool = Field(description="Whether nothing has changed.")
    role: RoleView = Field(description="The role before the deletion.")


class SecuritySettingsView(Schema):
    """The mode to set."""

    mode: ModeView = Field(
        description="`off`: calls need no credentials. `permissive`: refusals are counted, and the"
        " calls pass. `on`: a call needs a user with the right."
    )


class ProxySecurityView(Schema):
    """The security of one proxy."""

    name: str = Field(description="Name of the proxy.")
    version: int = Field(description="Version of its users, roles, tokens, quotas, bans and mode.")
    mode: ModeView = Field(description="The mode in force at this proxy.")
    key_ids: list[str] = Field(description="Ids in its key file, the first encrypts.")
    open_port: bool = Field(
        description="Whether other machines can reach its port for clients without TLS."
    )


class SecurityView(Schema):
    """The security of the cluster."""

    mode: ModeView = Field(description="The mode of the configuration.")
    floor: ModeView = Field(description="The least mode of this process (`security_floor`).")
    in_force: ModeView = Field(description="The stricter of both, by which this process checks.")
    version: int = Field(description="Number of changes of users, roles and the mode.")
    key_ids: list[str] = Field(
        description="Ids in the key file of this process, the first encrypts."
    )
    proxies: list[ProxySecurityView] = Field(
        description="The proxies that answered. After a change, those with an older version have"
        " not applied it within a second."
    )
    unreachable: list[str] | None = Field(
        None, description="Processes that did not answer. Missing if all answered."
    )


class KeyView(Schema):
    """A key that encrypts secrets of users."""

    id: str = Field(description="Id of the key.")
    secrets: int = Field(description="Number of secrets that it encrypts.")
    held: bool = Field(description="Whether the key file of this process has it.")


class KeysView(Schema):
    """The keys of the key file, and all others that encrypt a secret."""

    first_key_id: str = Field(description="Id of the key that encrypts new secrets.")
    keys: list[KeyView] = Field(description="The keys in the order of the file, then unknown ones.")
    lacking: list[str] = Field(
        description="Proxies that have not reported the first key, and unreachable processes."
    )


class AddedKeyView(Schema):
    """The new first key."""

    key_id: str = Field(description="Id of the key.")
    is_new: bool = Field(
        description="Whether this call added it. False: secrets under other keys are left."
    )
    dry_run: bool = Field(description="Whether nothing has changed.")


class EncryptionSettings(Schema):
    """A part of the encryption of all secrets under the first key."""

    key_id: Text = Field(description="Id of the first key.", examples=["k2"])
    page_token: Text | None = Field(None, description="`nextPageToken` of the previous part.")
    force: StrictBool = Field(
        False, description="Encrypt although a process has not reported the key."
    )


class EncryptedSecretsView(Schema):
    """A part of the encryption."""

    dry_run: bool = DRY_RUN
    encrypted: int = Field(description="Number of secrets that had another key.")
    undecryptable: list[str] = Field(
        description="Users with a secret that no key decrypts. It is unchanged."
    )
    next_page_token: str | None = NEXT_PAGE


class AccessQuestion(Schema):
    """One action of a user on one resource."""

    user: SubjectName = Field(description="Name of the user.")
    action: ActionName = Field(description="Pub, Sub, Create, Update, Delete, Get or List.")
    resource: ResourceName = Field(description="One resource.", examples=["Topic:payments"])
    address: Address | None = Field(None, description="Address of the client.")


class AccessAnswer(Schema):
    """The decision, and the entry that made it."""

    allowed: bool = Field(description="Whether the action is allowed.")
    reason: str = Field(description="The reason, in one sentence.")
    subject: str | None = Field(None, description="The user or the role of the deciding entry.")
    entry: EntryView | None = Field(None, description="The deciding entry.")
