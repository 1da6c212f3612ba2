"""The users of release jobs: their files, their rights, and their secrets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.security_home import SecurityHome
from tests.support.worlds.proxy_world import eventually
from tidemill.admin.cluster.job_users import RETIRE_AFTER_MS, JobNameIsTaken, JobUserUpkeep
from tidemill.admin.cluster.user_changes import UserChanges
from tidemill.common.errors import BrokerUnreachable
from tidemill.common.lifecycle import StartError
from tidemill.security.identities import SECRETS_MAX, User, UserType, user_of
from tidemill.security.job_users import RIGHTS, Job
from tidemill.security.secret_keys import new_key_line, parse_keys

KEYS = parse_keys(new_key_line("k1"))
FIRST, SECOND, THIRD = "the-first-secret-of-a-job", "the-second-secret", "the-third-secret-of"


def write(folder: Path, secret: str, *jobs: Job) -> None:
    for job in jobs:
        # As Kubernetes does it: another file takes the place of the old one.
        draft = folder / "draft"
        draft.touch(0o600)
        draft.write_text(f"{secret}\n")
        draft.replace(folder / job)


def upkeep(home: SecurityHome, folder: Path, now_ms: int = 1_000) -> JobUserUpkeep:
    return JobUserUpkeep(
        home.client, lambda: KEYS, lambda: now_ms, folder=str(folder), process="admin-0"
    )


def user(home: SecurityHome, job: Job = Job.CHECK) -> User:
    found = home.table.find(("user", job.user))
    assert found is not None
    return user_of(found)


def secrets_of(user: User) -> list[str]:
    return [KEYS.open(secret, user_id=user.id).decode() for secret in user.secrets]


def test_a_user_is_created_once_with_the_rights_of_its_job(tmp_path: Path) -> None:
    home = SecurityHome()
    write(tmp_path, FIRST, *Job)
    keeping = upkeep(home, tmp_path)
    for job in Job:
        assert asyncio.run(keeping.attempt(job))
        made = user(home, job)
        assert (made.name, made.type) == (f"tidemill-job-{job}", UserType.NORMAL)
        assert made.entries == RIGHTS[job]
        assert secrets_of(made) == [FIRST]
        assert not asyncio.run(keeping.attempt(job))
    assert len({user(home, job).id for job in Job}) == len(Job)
    assert len(home.audits) == len(Job)
    author = home.audits[0]
    assert (author.via, author.user, author.action) == ("bootstrap", "", "Create")
    assert author.resource == "User:tidemill-job-check"


def test_a_changed_secret_leaves_the_former_one_valid_for_a_day(tmp_path: Path) -> None:
    home = SecurityHome()
    for number, secret in enumerate((FIRST, SECOND, THIRD)):
        write(tmp_path, secret, Job.CHECK)
        assert asyncio.run(upkeep(home, tmp_path, 1_000 + number).attempt(Job.CHECK))
    found = user(home)
    assert secrets_of(found) == [SECOND, THIRD]
    assert len(found.secrets) == SECRETS_MAX
    assert [one.not_after_ms for one in found.secrets] == [1_002 + RETIRE_AFTER_MS, 0]
    assert [one.id for one in found.secrets] == [2, 3]
    assert home.audits[-1].action == "Update"


def test_a_former_secret_that_has_ended_is_not_kept(tmp_path: Path) -> None:
    home = SecurityHome()
    write(tmp_path, FIRST, Job.CHECK)
    asyncio.run(upkeep(home, tmp_path).attempt(Job.CHECK))
    ended = [replace(one, not_after_ms=5) for one in user(home).secrets]
    home.put(replace(user(home), secrets=tuple(ended)).to_item())
    assert asyncio.run(upkeep(home, tmp_path, 6).attempt(Job.CHECK))
    assert [one.not_after_ms for one in user(home).secrets] == [0]


def test_other_rights_are_removed_and_a_disabled_user_stays_disabled(tmp_path: Path) -> None:
    home = SecurityHome()
    write(tmp_path, FIRST, Job.CHECK)
    keeping = upkeep(home, tmp_path)
    asyncio.run(keeping.attempt(Job.CHECK))
    wider = replace(user(home), roles=("admin",), entries=RIGHTS[Job.PROVISION], is_enabled=False)
    home.put(replace(wider, service_accounts=("a/b",)).to_item())
    assert asyncio.run(keeping.attempt(Job.CHECK))
    found = user(home)
    assert (found.roles, found.entries, found.service_accounts) == ((), RIGHTS[Job.CHECK], ())
    assert not found.is_enabled
    assert secrets_of(found) == [FIRST]


def test_a_super_user_of_that_name_is_not_touched(tmp_path: Path) -> None:
    home = SecurityHome()
    home.put(User(name=Job.CHECK.user, id=1, type=UserType.SUPER).to_item())
    write(tmp_path, FIRST, Job.CHECK)
    with pytest.raises(JobNameIsTaken, match="tidemill-job-check is a super user"):
        asyncio.run(upkeep(home, tmp_path).attempt(Job.CHECK))
    assert user(home).secrets == ()


def test_a_change_of_another_admin_process_at_the_same_time_is_enough(tmp_path: Path) -> None:
    home = SecurityHome()
    write(tmp_path, FIRST, Job.CHECK)
    one, two = upkeep(home, tmp_path), upkeep(home, tmp_path)

    async def change_first() -> None:
        home.before_change = SecurityHome().before_change
        assert await two.attempt(Job.CHECK)

    home.before_change = change_first
    assert not asyncio.run(one.attempt(Job.CHECK))
    assert secrets_of(user(home)) == [FIRST]
    assert len(home.audits) == 1


def test_an_unreachable_home_is_an_error_that_is_repeated(tmp_path: Path) -> None:
    home = SecurityHome()
    home.is_up = False
    write(tmp_path, FIRST, Job.CHECK)
    with pytest.raises(BrokerUnreachable):
        asyncio.run(upkeep(home, tmp_path).attempt(Job.CHECK))


def test_changed_files_are_read_again_and_bad_ones_are_not(tmp_path: Path) -> None:
    home = SecurityHome()
    write(tmp_path, FIRST, Job.CHECK)
    keeping = upkeep(home, tmp_path)
    assert not keeping.read_again()
    write(tmp_path, FIRST, Job.CHECK)
    assert not keeping.read_again(), "the secret is the same"
    write(tmp_path, "short", Job.CHECK)
    assert not keeping.read_again()
    asyncio.run(keeping.attempt(Job.CHECK))
    assert secrets_of(user(home)) == [FIRST]
    write(tmp_path, SECOND, Job.CHECK, Job.ROLL)
    assert keeping.read_again()
    asyncio.run(keeping.attempt(Job.CHECK))
    assert secrets_of(user(home)) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("mode", "text"), [(0o604, FIRST), (0o600, "short"), (0o600, ""), (0o600, f"a {FIRST}")]
)
def test_a_bad_file_is_skipped_and_logged_without_its_content(
    tmp_path: Path, mode: int, text: str
) -> None:
    home = SecurityHome()
    write(tmp_path, text, Job.CHECK)
    (tmp_path / Job.CHECK).chmod(mode)
    write(tmp_path, SECOND, Job.ROLL)
    with capture_logs() as logs:
        keeping = upkeep(home, tmp_path)
    assert [(line["log_level"], line["job"]) for line in logs] == [("error", "check")]
    assert FIRST not in str(logs)
    # The others work, now and after a change.
    asyncio.run(keeping.attempt(Job.ROLL))
    assert secrets_of(user(home, Job.ROLL)) == [SECOND]
    write(tmp_path, THIRD, Job.ROLL)
    assert keeping.read_again()
    asyncio.run(keeping.attempt(Job.ROLL))
    assert secrets_of(user(home, Job.ROLL)) == [SECOND, THIRD]


def test_a_job_keeps_its_secret_while_its_file_is_malformed(tmp_path: Path) -> None:
    home = SecurityHome()
    write(tmp_path, FIRST, *Job)
    keeping = upkeep(home, tmp_path)
    write(tmp_path, "short", Job.CHECK)
    write(tmp_path, SECOND, Job.ROLL)
    assert keeping.read_again()
    for job in (Job.CHECK, Job.ROLL):
        asyncio.run(keeping.attempt(job))
    assert secrets_of(user(home, Job.CHECK)) == [FIRST]
    assert secrets_of(user(home, Job.ROLL)) == [SECOND]


def test_a_refused_user_does_not_hold_the_others(tmp_path: Path) -> None:
    home = SecurityHome()
    write(tmp_path, FIRST, *Job)
    keeping = upkeep(home, tmp_path)

    async def refuse_once() -> None:
        home.before_change = SecurityHome().before_change
        raise BrokerUnreachable("the home refuses the first change")

    async def scenario() -> None:
        home.before_change = refuse_once
        async with asyncio.timeout(30), keeping.running():
            await eventually(lambda: len(home.audits) == len(Job))

    asyncio.run(scenario())
    first, *others = Job
    assert [one.resource for one in home.audits] == [f"User:{job.user}" for job in (*others, first)]


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="it is not a folder"):
        upkeep(SecurityHome(), tmp_path / "none")


def test_a_secret_under_an_unknown_key_is_replaced() -> None:
    changes = UserChanges(lambda: KEYS, 1_000, "bootstrap")
    others = UserChanges(lambda: parse_keys(new_key_line("k2")), 1_000, "bootstrap")

    def made(by: UserChanges, old: User | None) -> User:
        return by.set_job_user(
            "u", old, entries=(), secret=FIRST, retire_after_ms=9, table_version=4
        )

    old = made(others, None)
    new = made(changes, old)
    assert [one.id for one in new.secrets] == [1, 2]
    assert made(changes, new) == new
