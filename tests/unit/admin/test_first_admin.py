"""The first administrator: its file, races of admin processes, and both policies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.security_home import SecurityHome
from tidemill.admin.cluster.first_admin import (
    PAGE_USERS,
    BootstrapPolicy,
    FirstAdmin,
    FirstAdminCreation,
    NameIsTaken,
    read_first_admin,
)
from tidemill.common.errors import BrokerGroupUnreachable, BrokerUnreachable, Conflict
from tidemill.common.lifecycle import StartError
from tidemill.security.bans import BAN, Ban, BanKind
from tidemill.security.identities import User, UserType, user_of
from tidemill.security.secret_keys import new_key_line, parse_keys

KEYS = parse_keys(new_key_line("k1"))
SECRET = "the-secret-of-root"
ONCE, ALWAYS = BootstrapPolicy.ONCE, BootstrapPolicy.ALWAYS


def creation(
    home: SecurityHome, policy: BootstrapPolicy = ONCE, secret: str = SECRET, now_ms: int = 1_000
) -> FirstAdminCreation:
    return FirstAdminCreation(
        home.client,
        lambda: KEYS,
        lambda: now_ms,
        admin=FirstAdmin("root", secret),
        policy=policy,
        process="admin-0",
    )


def attempt(home: SecurityHome, policy: BootstrapPolicy = ONCE, secret: str = SECRET) -> bool:
    return asyncio.run(creation(home, policy, secret).attempt())


def root_of(home: SecurityHome) -> User:
    found = home.table.find(("user", "root"))
    assert found is not None
    return user_of(found)


def secrets_of(user: User) -> list[str]:
    return [KEYS.open(secret, user_id=user.id).decode() for secret in user.secrets]


# ---------------------------------------------------------------- the file


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_file_has_a_name_and_a_secret(tmp_path: Path) -> None:
    found = read_first_admin(write(tmp_path / "admin", f"root\n{SECRET}\n", 0o440))
    assert found == FirstAdmin("root", SECRET)
    assert SECRET not in repr(found)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(StartError, match="chmod"):
        read_first_admin(write(tmp_path / "admin", f"root\n{SECRET}\n", mode))


@pytest.mark.parametrize(
    "text", ["", "root\n", f"root\n{SECRET}\nmore\n", f"{SECRET}+/\nroot\n", f"root\n{'s' * 15}\n"]
)
def test_a_malformed_file_is_refused_without_its_content(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartError) as caught:
        read_first_admin(write(tmp_path / "admin", text))
    assert SECRET not in str(caught.value)
    assert "sss" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="security_bootstrap_file"):
        read_first_admin(str(tmp_path / "none"))


# ---------------------------------------------------------------- once


def test_the_user_is_created_once_with_one_audit_record() -> None:
    home = SecurityHome()
    assert attempt(home)
    user = root_of(home)
    assert (user.type, user.is_enabled, user.id) == (UserType.SUPER, True, 1)
    assert (secrets_of(user), user.changed_by) == ([SECRET], "bootstrap")
    [author] = home.audits
    assert (author.via, author.user, author.process) == ("bootstrap", "", "admin-0")
    assert (author.resource, author.action) == ("User:root", "Create")
    assert not attempt(home, secret="another-secret-of-root")
    assert secrets_of(root_of(home)) == [SECRET]
    assert len(home.audits) == 1


def test_another_super_user_is_enough_on_the_last_page_too() -> None:
    home = SecurityHome()
    home.put(*(User(name=f"u{n:04}", id=n).to_item() for n in range(PAGE_USERS + 1)))
    assert attempt(home)
    home = SecurityHome()
    home.put(*(User(name=f"u{n:04}", id=n).to_item() for n in range(PAGE_USERS + 1)))
    disabled = User(name="z", id=9, type=UserType.SUPER, is_enabled=False)
    home.put(disabled.to_item())
    assert not attempt(home)
    assert home.audits == []


def test_a_normal_user_of_this_name_gets_no_rights() -> None:
    home = SecurityHome()
    home.put(User(name="root", id=1).to_item())
    with pytest.raises(NameIsTaken, match="normal user"):
        attempt(home)
    assert home.audits == []


def test_of_several_processes_one_creates_the_user() -> None:
    home = SecurityHome()

    async def race() -> list[object]:
        both_decided = asyncio.Barrier(2)

        async def wait_for_the_other() -> None:
            await both_decided.wait()

        home.before_change = wait_for_the_other
        first = await asyncio.gather(
            *(creation(home).attempt() for _ in range(2)), return_exceptions=True
        )
        return [*first, await creation(home).attempt()]

    *both, again = asyncio.run(race())
    assert both.count(True) == 1
    assert any(isinstance(each, Conflict) for each in both)
    assert again is False
    assert len(home.audits) == 1


def test_another_super_user_may_come_first() -> None:
    home = SecurityHome()

    async def create_another() -> None:
        home.put(User(name="other", id=5, type=UserType.SUPER).to_item())

    home.before_change = create_another
    with pytest.raises(Conflict):
        attempt(home)
    assert home.table.find(("user", "root")) is None


def test_a_copy_of_the_table_never_decides() -> None:
    home = SecurityHome()
    home.is_copy = True
    with pytest.raises(BrokerGroupUnreachable):
        attempt(home)
    home.is_up = False
    with pytest.raises(BrokerUnreachable):
        attempt(home)
    assert home.audits == []


# ---------------------------------------------------------------- always


def test_always_sets_the_secret_the_type_and_the_enabled_flag() -> None:
    home = SecurityHome()
    home.put(User(name="ops", id=7, type=UserType.SUPER).to_item())
    assert attempt(home, ALWAYS), "another super user does not matter"
    assert not attempt(home, ALWAYS), "nothing changes"
    item = json.loads(home.table.find(("user", "root")) or b"")
    item["user"].update(type="NORMAL", enabled=False)
    home.put({key: item[key] for key in ("op", "name", "user")})
    assert attempt(home, ALWAYS)
    user = root_of(home)
    assert (user.type, user.is_enabled, secrets_of(user)) == (UserType.SUPER, True, [SECRET])
    assert attempt(home, ALWAYS, "another-secret-of-root")
    after = root_of(home)
    assert (secrets_of(after), after.id) == (["another-secret-of-root"], user.id)
    assert after.secrets[0].id == user.secrets[0].id + 1
    assert [author.action for author in home.audits] == ["Create", "Update", "Update"]


def test_always_removes_the_certificates_of_the_user() -> None:
    """The REST API refuses users that list certificates, so they are a lock-out, too."""
    home = SecurityHome()
    attempt(home)
    item = json.loads(home.table.find(("user", "root")) or b"")
    item["user"]["certificates"] = ["of-a-lost-key"]
    home.put({key: item[key] for key in ("op", "name", "user")})
    assert not attempt(home, ONCE)
    assert root_of(home).certificates == ("of-a-lost-key",)
    assert attempt(home, ALWAYS)
    assert (root_of(home).certificates, secrets_of(root_of(home))) == ((), [SECRET])
    assert not attempt(home, ALWAYS), "nothing changes"


def test_always_replaces_a_secret_of_a_lost_key() -> None:
    home = SecurityHome()
    attempt(home)
    item = json.loads(home.table.find(("user", "root")) or b"")
    item["user"]["secrets"][0]["keyId"] = "lost"
    home.put({key: item[key] for key in ("op", "name", "user")})
    assert attempt(home, ALWAYS)
    assert secrets_of(root_of(home)) == [SECRET]


def test_always_ends_a_ban_of_the_user_and_once_does_not() -> None:
    home = SecurityHome()
    assert attempt(home)
    ban = Ban(kind=BanKind.USER, value="root", user_id=root_of(home).id)
    home.put(ban.to_item())
    assert not attempt(home, ONCE)
    assert home.table.find((BAN, ban.name)) is not None
    assert attempt(home, ALWAYS)
    assert home.table.find((BAN, ban.name)) is None
    assert len(home.audits) == 2
    assert not attempt(home, ALWAYS)
