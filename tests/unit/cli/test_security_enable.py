"""`tidemill security enable`: no lost answer and no refusal locks its caller out."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import LOST, ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.cli.app import run as run_commands
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE

DONE = 0


class Cluster:
    """The REST API of a cluster, as `security enable` uses it."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}  # of super users
        self.mode = "off"
        self.modes: list[str] = []  # that were set
        self.is_answer_lost = self.is_change_lost = self.is_refused = False

    def answer(self, request: ApiRequest) -> ApiAnswer:
        """Answer a request."""
        path, _, query = request.path.partition("?")
        is_dry = "dryRun=true" in query
        if path == "/users":
            user = {"type": "SUPER", "enabled": True, "certificates": []}
            return ApiAnswer({"users": [user for _ in self.secrets]})
        if path == "/session":
            return ApiAnswer(self.session_of(request.authorization))
        if path.startswith("/users/"):
            if self.is_refused:
                return refusal("admin exists")
            if not is_dry and not self.is_change_lost:
                self.secrets[path.removeprefix("/users/")] = request.body["secret"]
            return LOST if self.is_answer_lost else ApiAnswer({})
        if request.method == "PUT" and not is_dry:
            self.mode = request.body["mode"]
            self.modes.append(self.mode)
        mode = request.body["mode"] if request.method == "PUT" else self.mode
        proxies = [
            {"name": f"proxy-{n}", "version": 2, "openPort": n == 1, "keyIds": []} for n in (0, 1)
        ]
        found: dict[str, object] = {
            "inForce": mode,
            "mode": self.mode,
            "floor": "off",
            "version": 2,
        }
        found["proxies"] = proxies
        return ApiAnswer(found)

    def session_of(self, authorization: str) -> dict[str, object]:
        """Return the caller; the mode off checks no credentials."""
        pair = base64.b64decode(authorization.removeprefix("Basic ")).decode().split(":")
        is_known = len(pair) == 2 and self.secrets.get(pair[0]) == pair[1]
        return {"superCredentials": is_known and self.mode != "off", "mode": self.mode}


class Terminal(io.StringIO):
    """The standard input of a user at a terminal."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return True


class World:
    """A cluster and an account of a user of the machine."""

    def __init__(self, cluster: Cluster, address: str, file: Path) -> None:
        self.cluster, self.address, self.file = cluster, address, file

    def run(self, *arguments: str) -> Result:
        """Run `tidemill security ...`."""
        return CliRunner().invoke(app, ["--admin", self.address, "security", *arguments])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    cluster = Cluster()
    with scripted_api(cluster.answer) as address:
        yield World(cluster, address, tmp_path / "tidemill" / "credentials")


def test_a_refused_user_leaves_no_file(world: World) -> None:
    world.cluster.is_refused = True
    assert world.run("enable").exit_code == EXIT_REFUSED
    assert not world.file.exists()
    assert world.run("enable", "--name", "two words").exit_code == EXIT_USAGE
    assert not world.file.exists()
    world.cluster.is_refused = False
    assert world.run("enable").exit_code == DONE, "the second call tries again"
    assert world.cluster.mode == "on"


@pytest.mark.parametrize("is_change_lost", [True, False])
def test_a_lost_answer_locks_nobody_out(world: World, is_change_lost: bool) -> None:
    """The user was created, or not: the second call has its secret in both cases."""
    world.cluster.is_answer_lost, world.cluster.is_change_lost = True, is_change_lost
    assert world.run("enable").exit_code == EXIT_UNREACHABLE
    assert world.cluster.mode == "off"
    world.cluster.is_answer_lost = world.cluster.is_change_lost = False
    assert world.run("enable").exit_code == DONE
    assert world.cluster.mode == "on"
    saved = ["admin", world.cluster.secrets["admin"], world.address]
    assert world.file.read_text().split() == saved
    assert world.file.stat().st_mode & 0o777 == 0o600


def test_a_caller_that_is_no_super_user_is_not_locked_out(world: World) -> None:
    world.cluster.secrets["other"] = "a-secret-of-the-other"
    refused = world.run("enable")
    assert refused.exit_code == EXIT_REFUSED
    assert "would lock this command out" in refused.output
    assert world.cluster.mode == "off"
    assert world.run("enable", "--force").exit_code == DONE
    assert world.cluster.mode == "on"


def test_the_saved_credentials_of_a_super_user_suffice(world: World) -> None:
    assert world.run("enable", "--permissive").exit_code == DONE
    assert world.run("enable").exit_code == DONE
    assert world.cluster.modes == ["permissive", "on"]
    world.cluster.mode = "off"
    assert world.run("enable").exit_code == DONE
    assert world.cluster.modes[2:] == ["permissive", "on"], "permissive, to check the credentials"


def test_credentials_of_another_user_are_not_overwritten(world: World) -> None:
    world.file.parent.mkdir()
    world.file.touch(0o600)
    other_api = "admin\na-secret-of-sixteen\nhttp://127.0.0.1:1\n"
    for content in ("", "ops\na-secret-of-sixteen\n", other_api):
        world.file.write_text(content)
        assert world.run("enable").exit_code == EXIT_USAGE
        assert world.file.read_text() == content
    assert world.cluster.secrets == {}


def test_a_script_confirms_that_it_disables_security(world: World) -> None:
    world.cluster.mode = "on"
    refused = world.run("disable")
    assert (refused.exit_code, world.cluster.modes) == (EXIT_USAGE, [])
    assert "add --yes" in refused.output
    assert world.run("disable", "--yes").exit_code == DONE
    assert world.cluster.modes == ["off"]


@pytest.mark.parametrize(("reply", "modes"), [("n\n", []), ("y\n", ["off"])])
def test_a_user_at_a_terminal_is_asked_before_security_is_disabled(
    world: World, monkeypatch: pytest.MonkeyPatch, reply: str, modes: list[str]
) -> None:
    world.cluster.mode = "on"
    monkeypatch.setattr("sys.stdin", Terminal(reply))
    with pytest.raises(SystemExit) as ended:
        run_commands(["--admin", world.address, "security", "disable"])
    assert (ended.value.code == DONE) == bool(modes)
    assert world.cluster.modes == modes


def test_a_dry_run_changes_nothing(world: World) -> None:
    shown = world.run("enable", "--dry-run")
    assert (shown.exit_code, world.cluster.modes) == (DONE, [])
    assert not world.file.exists()
    assert "admin  super, would be new" in shown.output
    assert "secret" not in shown.output
    assert "off -> on  would be set" in shown.output
    assert shown.output.count("does not require TLS") == 1
    assert "warning   proxy-1: its port for clients does not require TLS" in shown.output
    assert world.run("enable").exit_code == DONE
    assert "on -> off  would be set" in world.run("disable", "--dry-run").output
    assert world.cluster.mode == "on"
