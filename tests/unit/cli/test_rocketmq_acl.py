"""Users and rights of RocketMQ, as its tools print them."""

from __future__ import annotations

import pytest

from tidemill.cli.rocketmq_acl import Imported, ImportedUser, read_users, roles_of
from tidemill.security.acl import ENTRIES_MAX
from tidemill.security.identities import UserType


def table(*rows: tuple[str, ...]) -> str:
    """Print rows as mqadmin does: left-aligned columns, two blanks apart."""
    widths = (16, *[22] * 5)
    lines = ["  ".join(f"{cell:<{widths[n]}}" for n, cell in enumerate(row)) for row in rows]
    return "\n".join(lines) + "\n"


USERS = table(
    ("#UserName", "#Password", "#UserType", "#UserStatus"),
    ("orders", "a-secret-of-orders", "Normal", "enable"),
    ("root", "a-secret-of-the-root", "Super", "enable"),
    ("gone", "a-secret-of-the-gone", "Normal", "disable"),
)
ACLS = table(
    ("#Subject", "#PolicyType", "#Resource", "#Actions", "#SourceIp", "#Decision"),
    ("User:orders", "Custom", "Topic:orders", "[Pub, Sub]", "[10.1.0.0/16, 10.2.3.4]", "Allow"),
    ("User:orders", "Custom", "Group:billing*", "[Sub]", "[]", "Allow"),
    ("User:orders", "Default", "Topic:*", "[Pub]", "null", "Deny"),
    ("User:gone", "Default", "Topic:*", "Pub", "", "Deny"),
    ("User:root", "", "", "", "", ""),
    ("list acls from 127.0.0.1:10911 success.",),
)
PLAIN = """\
globalWhiteRemoteAddresses:
  - 10.10.103.*
accounts:
  - accessKey: RocketMQ
    secretKey: 12345678
    whiteRemoteAddress: 192.168.0.*
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
      - topicC = SUB
    groupPerms:
      - groupA=DENY
  - accessKey: rocketmq2
    secretKey: "123456789"
    admin: true
"""


def read(*texts: str, weak: bool = False) -> Imported:
    return read_users(texts, allows_weak=weak)


def rules(user: ImportedUser) -> list[tuple[str, list[str], bool]]:
    return [(one.resource, one.to_item()["actions"], one.is_allowed) for one in user.entries]


@pytest.mark.parametrize("texts", [(USERS, ACLS), (ACLS, USERS), (USERS + ACLS,)])
def test_tables_of_mqadmin_are_read(texts: tuple[str, ...]) -> None:
    found = read(*texts)
    assert (found.problems, found.notes) == ([], [])
    users = {user.name: user for user in found.users}
    assert users.keys() == {"orders", "root", "gone"}
    orders = users["orders"]
    assert (orders.secret, orders.type, orders.is_enabled) == (
        "a-secret-of-orders",
        UserType.NORMAL,
        True,
    )
    assert rules(orders) == [
        ("Topic:orders", ["Pub", "Sub"], True),
        ("Group:billing*", ["Sub"], True),
    ]
    assert orders.entries[0].sources == ("10.1.0.0/16", "10.2.3.4")
    assert orders.entries[1].sources == ()
    assert users["root"].type is UserType.SUPER
    assert not users["gone"].is_enabled


def test_default_policies_become_shared_roles() -> None:
    users = read(USERS, ACLS).users
    roles, role_of = roles_of(users)
    assert role_of == {"orders": "orders.default", "gone": "orders.default"}
    [entry] = roles["orders.default"]
    assert (entry.resource, entry.is_allowed) == ("Topic:*", False)
    long = [
        ImportedUser(name="x" * 64, default_entries=users[0].entries),
        ImportedUser(name="x" * 64, default_entries=users[0].default_entries),
    ]
    names = list(roles_of(long)[0])
    assert len(names) == 2
    assert max(map(len, names)) <= 64


def test_accounts_of_acl_1_are_read() -> None:
    found = read(PLAIN, weak=True)
    assert found.problems == []
    assert [note.split(" is not imported")[0] for note in found.notes] == [
        "globalWhiteRemoteAddresses",
        "account RocketMQ: whiteRemoteAddress",
    ]
    user, root = found.users
    assert (user.name, user.secret) == ("RocketMQ", "12345678")
    assert rules(user) == [
        ("Topic:topicA", ["All"], False),
        ("Topic:topicB", ["Pub", "Sub"], True),
        ("Topic:topicC", ["Sub"], True),
        ("Group:groupA", ["All"], False),
    ]
    assert [(one.resource, one.is_allowed) for one in user.default_entries] == [
        ("Topic:*", False),
        ("Group:*", True),
    ]
    assert (root.type, root.entries, root.default_entries) == (UserType.SUPER, [], [])


def test_weak_secrets_need_the_option() -> None:
    problems = read(PLAIN).problems
    assert len(problems) == 2
    assert all("--allow-weak" in problem for problem in problems)
    assert not any("12345678" in problem for problem in problems), "no text shows a secret"
    too_weak = read(PLAIN.replace("12345678\n", "12345\n"), weak=True).problems
    assert [problem.split(":")[0] for problem in too_weak] == ["user RocketMQ"]


def line(*columns: str) -> str:
    return USERS + ACLS + "  ".join(columns)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither a table"),
        ("accounts: 5", "neither a table"),
        ("a: [", "neither a table"),
        ("accounts: [5]", "no accessKey"),
        (PLAIN.replace("topicB=PUB|SUB", "topicB=READ"), "permission 'READ'"),
        (line("User:orders", "Custom", "Topic:a*b", "[Pub]", "[]", "Allow"), "at its end"),
        (line("User:orders", "Custom", "Topic:a", "[Fly]", "[]", "Allow"), "no action 'Fly'"),
        (line("User:orders", "Custom", "Topic:a", "[Pub]", "[10.*]", "Allow"), "10.*"),
        (line("User:orders", "Custom", "Topic:a", "[Pub]", "[]", "Maybe"), "Maybe is neither"),
        (line("Role:orders", "Custom", "Topic:a", "[Pub]", "[]", "Allow"), "not User:NAME"),
        (line("User:orders", "Custom", "Topic:a", "[Pub]"), "4 columns"),
        (line("User:other", "Custom", "Topic:a", "[Pub]", "[]", "Allow"), "no secret"),
        (USERS + "orders  a-secret-of-a-second  Normal  enable", "two different secrets"),
        (USERS + "a-secret-of-nobody", "1 columns"),
        (USERS + "x  a-secret-of-orders  a-secret  enable", "type or the status of the user"),
        (USERS + "x  a-secret-of-orders  Normal  DISABLED", "type or the status of the user"),
        (USERS + "per son  a-secret-of-orders  Normal  enable", "no name of a user"),
    ],
)
def test_what_cannot_be_imported_is_named(text: str, reason: str) -> None:
    problems = read(text, weak=True).problems
    assert any(reason in problem for problem in problems), problems
    assert not any("a-secret" in problem for problem in problems), "no text shows a secret"


def test_a_user_has_a_limited_number_of_entries() -> None:
    rows = [f"User:orders  Custom  Topic:t{n}  [Pub]  []  Allow" for n in range(ENTRIES_MAX + 1)]
    head = ACLS.splitlines()[0]
    assert "at most 256" in read("\n".join([USERS, head, *rows])).problems[0]
    assert read("\n".join([USERS, head, *rows[1:]])).problems == []


def test_a_changed_meaning_is_noted() -> None:
    custom = ("User:orders", "Custom", "Topic:pay*", "[Pub]", "[]", "Allow")
    default = ("User:orders", "Default", "Topic:payments", "[Pub]", "[]", "Deny")
    [note] = read(line(*custom) + "\n" + "  ".join(default)).notes
    assert "Default entry of Topic:payments decides before the Custom entry of Topic:pay*" in note
    cluster = ("User:orders", "Custom", "Cluster:DefaultCluster", "[Get]", "[]", "Allow")
    found = read(line(*cluster))
    assert "becomes Cluster:*" in found.notes[0]
    orders = next(user for user in found.users if user.name == "orders")
    assert rules(orders)[-1] == ("Cluster:*", ["Get"], True)


@pytest.mark.parametrize(
    "text", ["0123456701234567", "1234_5678_9012_3456", "0x1234567890abcdef", "1234567890123456.50"]
)
def test_a_secret_without_quotes_is_imported_as_it_is_written(text: str) -> None:
    """RocketMQ reads the field as a text, so its clients sign with this text."""
    found = read(account(secretKey=text))
    assert (found.problems, found.users[0].secret) == ([], text)


def account(**fields: str) -> str:
    fields = {"accessKey": "orders", "secretKey": "a-secret-of-orders"} | fields
    return "accounts:\n- " + "\n  ".join(f"{key}: {value}" for key, value in fields.items()) + "\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (account(accessKey=""), "account 1 of the file: it has no accessKey"),
        (account(accessKey="~"), "no accessKey"),
        (account(accessKey="null"), "no accessKey"),
        (account(accessKey="[a-secret]"), "accessKey is not a text"),
        (account(secretKey=""), "no secretKey"),
        (account(secretKey="[a-secret-of-orders]"), "secretKey is not a text"),
        (account(secretKey="2020-99-99"), "16 to 128"),
        (account(topicPerms="5"), "topicPerms is not a list of texts"),
        (account(topicPerms="orders=PUB"), "topicPerms is not a list of texts"),
        (account(groupPerms="[{a-secret: PUB}]"), "groupPerms is not a list of texts"),
        (account(defaultTopicPerm="[PUB]"), "defaultTopicPerm is not a text"),
        (account(admin="maybe"), "neither true nor false"),
        (account(topicPerms="&a [a=PUB]", groupPerms="*a"), "YAML aliases"),
        ("accounts: " + "[" * 100_000, "more than 8 levels"),
        ("accounts: " + "[" * 8 + "]" * 8, "more than 8 levels"),
        ("accounts: " + "[" * 7 + "]" * 7, "no accessKey"),
        ("accounts: {[a]: b}", "neither a table"),
    ],
)
def test_a_malformed_account_is_a_problem(text: str, reason: str) -> None:
    problems = read(text).problems
    assert any(reason in problem for problem in problems), problems
    assert not any("a-secret" in problem for problem in problems), "no text shows a secret"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", UserType.SUPER),
        ("yes", UserType.SUPER),
        ("False", UserType.NORMAL),
        ("off", UserType.NORMAL),
        ("", UserType.NORMAL),
    ],
)
def test_the_booleans_of_yaml_decide_about_a_super_user(text: str, expected: UserType) -> None:
    found = read(account(admin=text, topicPerms="", whiteRemoteAddress="null"))
    assert (found.problems, found.notes, found.users[0].type) == ([], [], expected)


@pytest.mark.parametrize("name", ["orders*", "*", "or*ders", "%RETRY%*"])
@pytest.mark.parametrize(("key", "kind"), [("topicPerms", "Topic"), ("groupPerms", "Group")])
@pytest.mark.parametrize("permission", ["PUB", "ANY", "DENY"])
def test_a_pattern_of_acl_1_matches_nothing(
    name: str, key: str, kind: str, permission: str
) -> None:
    """Its names are literal, and no topic has such a name. A prefix would be a wider right."""
    found = read(account(**{key: f'["{name}={permission}", "orders = SUB"]'}))
    assert [entry.resource for entry in found.users[0].entries] == [f"{kind}:orders"]
    assert [name in note for note in found.notes] == [True]
    assert not found.problems


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("orders", "a-secret-of-orders", "Super", "enable"), "two different types"),
        (("orders", "a-secret-of-orders", "Normal", "disable"), "two different statuses"),
    ],
)
def test_tables_that_disagree_about_a_user_are_a_problem(row: tuple[str, ...], reason: str) -> None:
    """The last broker must not make a user super, or enable it."""
    other = USERS.splitlines()[0] + "\n" + table(row)
    for texts in ((USERS, other), (other, USERS)):
        assert read(*texts).problems == [f"user orders has {reason}"]
    assert read(USERS, USERS).problems == []


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_changes_a_path_is_a_problem(name: str) -> None:
    """Otherwise the command ends after it has created the users before."""
    [problem] = read(USERS + f"{name}  a-secret-of-the-dots  Normal  enable").problems
    assert problem == f"user {name}: a path of the REST API cannot end with this name"


def test_a_row_has_the_columns_of_its_header() -> None:
    """With an empty password, the type would become the secret."""
    header = USERS.splitlines()[0] + "\n"
    row = table(("orders", "", "Normal", "disable"))
    assert read(header + row, weak=True).problems == ["line 2 has 3 columns, and its header has 4"]
    [user] = read(header + "orders  a-secret-of-orders  null  null").users
    assert (user.type, user.is_enabled) == (UserType.NORMAL, True)
    short = "#UserName  #Password  #UserType\n"
    [user] = read(short + "orders  a-secret-of-orders  Super").users
    assert (user.type, user.is_enabled) == (UserType.SUPER, True)
    [problem] = read(short + "orders  a-secret-of-orders  Super  disable").problems
    assert problem == "line 2 has 4 columns, and its header has 3"
    [problem] = read("#UserName  #Password\norders  a-secret-of-orders").problems
    assert problem == "line 2: the header has 2 columns, not 3 or 4"
