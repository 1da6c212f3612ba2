"""Users and rights of RocketMQ, read from what its tools print and from its files.

    mqadmin listUser    a table: #UserName #Password #UserType [#UserStatus]
    mqadmin listAcl     a table: #Subject #PolicyType #Resource #Actions #SourceIp #Decision
    plain_acl.yml       ACL 1.0: accounts with keys and permissions

Columns are two blanks apart. RocketMQ uses the Default policy of a user only if no Custom entry
matches. Here the Default policy becomes a role, and one ranking covers both. Sources: AclInfo and
UserInfo of RocketMQ 5.5, its migration of ACL 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.security.acl import ANYTHING, ENTRIES_MAX, AccessEntry, check_names, parse_entry
from tidemill.security.identities import (
    SECRET_CHARS_MIN,
    USER_NAME_CHARS_MAX,
    WEAK_SECRET_CHARS_MIN,
    UserType,
    check_secret,
    check_user_name,
)

_DEFAULT: Final = ".default"  # the end of the name of a role with a Default policy
_COLUMNS: Final = re.compile(r" {2,}")
_USER_TABLE: Final = "#UserName"
_ACL_TABLE: Final = "#Subject"
# The last line of a table of older versions.
_SUCCESS: Final = re.compile(r"(list|get) (acls?|users?) from .* success\.")
_ALLOW: Final = frozenset({"allow", "grant"})
_DENY: Final = frozenset({"deny"})
# Java prints a missing value as null. RocketMQ treats such a user as normal and enabled.
_NO_VALUE: Final = "null"
_USER_TYPES: Final[Mapping[str, UserType]] = {
    "super": UserType.SUPER,
    "normal": UserType.NORMAL,
    _NO_VALUE: UserType.NORMAL,
}
_STATUSES: Final[Mapping[str, bool]] = {"enable": True, "disable": False, _NO_VALUE: True}
# YAML 1.1, which RocketMQ reads. Booleans are compared in lower case.
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "yes", "on"})
_FALSE: Final = frozenset({"", "false", "no", "off"})
_DEPTH_MAX: Final = 8  # A plain_acl.yml has four. The YAML parser is recursive and slow.
_PATH_STEPS: Final = frozenset({".", ".."})
_PERMISSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "PUB": ("Pub",),
    "SUB": ("Sub",),
    "PUB|SUB": ("Pub", "Sub"),
    "SUB|PUB": ("Pub", "Sub"),
    "ANY": ("All",),
    "DENY": ("All",),
}


@dataclass(slots=True, kw_only=True)
class ImportedUser:
    """One user of RocketMQ."""

    name: str
    secret: str = ""  # "": a table of rights names the user, and no table of users does
    type: UserType = UserType.NORMAL
    is_enabled: bool = True
    entries: list[AccessEntry] = field(default_factory=list)  # of the Custom policy
    default_entries: list[AccessEntry] = field(default_factory=list)


class Imported(NamedTuple):
    """The users, and what an operator must know."""

    users: list[ImportedUser]
    notes: list[str]
    problems: list[str]  # With one of them, nothing is imported.


def read_users(texts: Sequence[str], *, allows_weak: bool) -> Imported:
    """Read files of RocketMQ. `allows_weak` accepts secrets of 6 characters."""
    found = Imported([], [], [])
    users: dict[str, ImportedUser] = {}
    for text in texts:
        if any(line.startswith((_USER_TABLE, _ACL_TABLE)) for line in text.splitlines()):
            _read_tables(text, users, found)
        else:
            _read_plain_acl(text, users, found)
    for user in users.values():
        _check(user, found, allows_weak=allows_weak)
    found.users.extend(users.values())
    return found


def roles_of(users: Sequence[ImportedUser]) -> tuple[dict[str, list[AccessEntry]], dict[str, str]]:
    """Return the roles with the Default policies, and the role of each user.

    Users with the same Default policy share a role.
    """
    roles: dict[str, list[AccessEntry]] = {}
    of_users: dict[str, str] = {}
    for user in users:
        if not user.default_entries:
            continue
        same = (name for name, entries in roles.items() if entries == user.default_entries)
        name = next(same, _role_name(user.name, roles))
        roles[name] = user.default_entries
        of_users[user.name] = name
    return roles, of_users


def _role_name(user: str, taken: Mapping[str, object]) -> str:
    name = user[: USER_NAME_CHARS_MAX - len(_DEFAULT) - len(str(len(taken)))] + _DEFAULT
    return f"{name}{len(taken)}" if name in taken else name


# ---------------------------------------------------------------- tables of mqadmin


def _read_tables(text: str, users: dict[str, ImportedUser], found: Imported) -> None:
    table, width = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        columns = _COLUMNS.split(line.strip())
        if columns[0] in {_USER_TABLE, _ACL_TABLE}:
            table, width = columns[0], len(columns)
        elif not line.strip() or _SUCCESS.fullmatch(line.strip()):
            continue
        elif table == _USER_TABLE:
            _read_user(number, columns, width, users, found)
        elif table == _ACL_TABLE:
            _read_entry(number, columns, users, found)
        else:
            found.notes.append(f"line {number} is before the first table, and is ignored")


def _read_user(
    number: int, columns: list[str], width: int, users: dict[str, ImportedUser], found: Imported
) -> None:
    """Read a row below a header of `width` columns."""
    # The line may have a secret, so no text shows it.
    if width not in {3, 4}:
        found.problems.append(f"line {number}: the header has {width} columns, not 3 or 4")
        return
    if len(columns) != width:
        # With an empty password, the type would become the secret.
        found.problems.append(
            f"line {number} has {len(columns)} columns, and its header has {width}"
        )
        return
    name, secret, kind, *statuses = columns
    status = statuses[0].lower() if statuses else _NO_VALUE
    if kind.lower() not in _USER_TYPES or status not in _STATUSES:
        found.problems.append(f"line {number}: the type or the status of the user is unknown")
        return
    user_type = _USER_TYPES[kind.lower()]
    is_enabled = _STATUSES[status]
    user = users.setdefault(name, ImportedUser(name=name))
    if user.secret:  # A row before this one has the user.
        for is_same, values in (
            (user.secret == secret, "secrets"),
            (user.type is user_type, "types"),
            (user.is_enabled is is_enabled, "statuses"),
        ):
            if not is_same:
                found.problems.append(f"user {name} has two different {values}")
    user.secret, user.type, user.is_enabled = secret, user_type, is_enabled


def _read_entry(
    number: int, columns: list[str], users: dict[str, ImportedUser], found: Imported
) -> None:
    if len(columns) == 1:
        return  # a subject without a policy
    if len(columns) == 5:
        columns = [*columns[:4], "", columns[4]]  # no source address
    if len(columns) != 6:
        found.problems.append(f"line {number} has {len(columns)} columns, not 6")
        return
    subject, policy, resource, actions, sources, decision = columns
    kind, _, name = subject.partition(":")
    if kind != "User" or not name:
        found.problems.append(f"line {number}: {subject} is not User:NAME")
        return
    if decision.lower() not in _ALLOW | _DENY:
        found.problems.append(f"line {number}: {decision} is neither Allow nor Deny")
        return
    user = users.setdefault(name, ImportedUser(name=name))
    _add(
        user,
        resource,
        _items(actions),
        _items(sources),
        f"line {number}",
        found,
        is_allowed=decision.lower() in _ALLOW,
        is_default=policy.lower() == "default",
    )


def _items(text: str) -> list[str]:
    """Read a list as Java prints it: [a, b]."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [item.strip() for item in inner.split(",") if item.strip() not in {"", "null"}]


# ---------------------------------------------------------------- ACL 1.0


def _read_plain_acl(text: str, users: dict[str, ImportedUser], found: Imported) -> None:
    try:
        content = _load_yaml(text)
    except BadRequest as error:
        found.problems.append(error.message)
        return
    accounts = content.get("accounts") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(accounts, list):
        found.problems.append(
            "a file has neither a table of `mqadmin listUser` or `mqadmin listAcl`, nor the list"
            " `accounts` of a plain_acl.yml"
        )
        return
    if not _is_null(content.get("globalWhiteRemoteAddresses", "")):
        found.notes.append(
            "globalWhiteRemoteAddresses is not imported: calls from these addresses needed no"
            " credentials, and need them here"
        )
    for number, account in enumerate(accounts, 1):
        try:
            _read_account(account, users, found)
        except BadRequest as error:
            found.problems.append(f"account {number} of the file: {error.message}")


def _load_yaml(text: str) -> object:
    """Return a document whose scalars are texts, as the file has them; None for another file.

    RocketMQ reads keys and secrets as texts: 0123 is not the number 83. Raises BadRequest.
    """
    import yaml  # The other commands need no YAML.

    try:
        depth = 0
        for event in yaml.parse(text, yaml.BaseLoader):
            # An alias repeats a node, so a short file could have billions of permissions.
            if isinstance(event, yaml.AliasEvent):
                raise BadRequest("a file has YAML aliases (*NAME): write each value in full")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEPTH_MAX:
                raise BadRequest(f"a file has more than {_DEPTH_MAX} levels of lists and maps")
        loader = yaml.BaseLoader(text)  # It makes only texts.
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError:
        return None


def _is_null(value: object) -> bool:
    return isinstance(value, str) and value in _NULLS


def _text_of(account: Mapping[str, object], key: str) -> str:
    """Return a field of an account, "" without it. Raises BadRequest, without the value."""
    value = account.get(key, "")
    if not isinstance(value, str):
        raise BadRequest(f"{key} is not a text")
    return "" if _is_null(value) else value


def _texts_of(account: Mapping[str, object], key: str) -> list[str]:
    """Return a list of an account, empty without it. Raises BadRequest."""
    value = account.get(key, "")
    if _is_null(value):
        return []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BadRequest(f"{key} is not a list of texts")
    return value


def _read_account(account: object, users: dict[str, ImportedUser], found: Imported) -> None:
    """Read an account. Raises BadRequest."""
    if not isinstance(account, dict) or not (name := _text_of(account, "accessKey")):
        raise BadRequest("it has no accessKey")
    if name in users:
        found.notes.append(f"account {name} is there twice, and the first one is imported")
        return
    if not (secret := _text_of(account, "secretKey")):
        raise BadRequest("it has no secretKey")
    admin = _text_of(account, "admin").lower()
    if admin not in _TRUE | _FALSE:
        raise BadRequest("admin is neither true nor false")
    user = users[name] = ImportedUser(
        name=name, secret=secret, type=UserType.SUPER if admin in _TRUE else UserType.NORMAL
    )
    if not _is_null(account.get("whiteRemoteAddress", "")):
        found.notes.append(
            f"account {name}: whiteRemoteAddress is not imported, because its calls needed no"
            " signature from these addresses"
        )
    for key, kind in (("topicPerms", "Topic"), ("groupPerms", "Group")):
        for text in _texts_of(account, key):
            resource, _, permission = text.partition("=")
            resource = resource.strip()
            # RocketMQ looks the name up in a map, and no topic or group has this character.
            if ANYTHING in resource:
                found.notes.append(
                    f"account {name}: {key} has {resource}, and is imported without it: names of"
                    " ACL 1.0 are literal, so this one matched nothing"
                )
                continue
            _add_permission(user, f"{kind}:{resource}", permission, found)
    for key, kind in (("defaultTopicPerm", "Topic"), ("defaultGroupPerm", "Group")):
        if permission := _text_of(account, key):
            _add_permission(user, f"{kind}:*", permission, found, is_default=True)


def _add_permission(
    user: ImportedUser, resource: str, text: str, found: Imported, *, is_default: bool = False
) -> None:
    permission = text.replace(" ", "").upper()
    where = f"account {user.name}"
    if permission not in _PERMISSIONS:
        known = ", ".join(_PERMISSIONS)
        found.problems.append(f"{where}: {resource} has the permission {text!r}; known: {known}")
        return
    _add(
        user,
        resource,
        _PERMISSIONS[permission],
        (),
        where,
        found,
        is_allowed=permission != "DENY",
        is_default=is_default,
    )


# ---------------------------------------------------------------- both


def _add(
    user: ImportedUser,
    resource: str,
    actions: Sequence[str],
    sources: Sequence[str],
    where: str,
    found: Imported,
    *,
    is_allowed: bool,
    is_default: bool,
) -> None:
    if resource.startswith("Cluster:") and resource != "Cluster:*":
        found.notes.append(f"{where}: {resource} becomes Cluster:*, because areas are not clusters")
        resource = "Cluster:*"
    try:
        entry = parse_entry(resource, actions, sources=sources, is_allowed=is_allowed)
        check_names([entry])
    except BadRequest as error:
        found.problems.append(f"{where}: {error.message}")
        return
    entries = user.default_entries if is_default else user.entries
    if entry not in entries:
        entries.append(entry)


def _check(user: ImportedUser, found: Imported, *, allows_weak: bool) -> None:
    try:
        check_user_name(user.name)
        if user.name in _PATH_STEPS:
            raise BadRequest("a path of the REST API cannot end with this name")
        if not user.secret:
            raise BadRequest("it has rights and no secret; give the table of users, too")
        check_secret(user.secret, is_weak_allowed=allows_weak)
    except BadRequest as error:
        is_weak = WEAK_SECRET_CHARS_MIN <= len(user.secret) < SECRET_CHARS_MIN
        remedy = "; --allow-weak imports it" if is_weak and not allows_weak else ""
        found.problems.append(f"user {user.name}: {error.message}{remedy}")
    for entries in (user.entries, user.default_entries):
        if len(entries) > ENTRIES_MAX:
            found.problems.append(
                f"user {user.name} has {len(entries)} entries in a policy; at most {ENTRIES_MAX}"
                " are allowed: use prefixes"
            )
    found.notes.extend(_changed_decisions(user))


def _changed_decisions(user: ImportedUser) -> Iterator[str]:
    """Yield a note for each Default entry that outranks a Custom one with another decision."""
    for default in user.default_entries:
        for custom in user.entries:
            if default.is_allowed == custom.is_allowed or not default.actions & custom.actions:
                continue
            if _outranks(default, custom):
                yield (
                    f"user {user.name}: the Default entry of {default.resource} decides before the"
                    f" Custom entry of {custom.resource} here; check it with `tidemill acl check`"
                )


def _outranks(one: AccessEntry, other: AccessEntry) -> bool:
    """Whether `one` decides about a resource of `other`."""
    if other.resource == one.resource:
        return not one.is_allowed  # In one rank, DENY wins.
    if other.resource == ANYTHING:
        return True
    return other.is_prefix and other.type is one.type and one.name.startswith(other.name)
