"""The rotation of the key that encrypts the secrets of users, by the REST API."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.admin.test_rights import KEYS, SECRET
from tests.unit.admin.test_token_routes import TokenWorld
from tests.unit.security.test_key_file import write
from tidemill.admin.cluster import key_rotation
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http.identities import IdentityCheck
from tidemill.admin.routes import brokers_of
from tidemill.security.identities import User, user_of
from tidemill.security.key_file import KeyFile, add_first_key, read_keys
from tidemill.security.secret_keys import KEYS_MAX, SecretKeys
from tidemill.security.table import Mode, SealingKey, sealing_key_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

ENDS_MS = 10**15


class RotationWorld(TokenWorld):
    """The users of TokenWorld, three others with two secrets, a key file, and two proxies."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys"
        write(self.file, f"k1 {(b'k' * 32).hex()}\n")
        super().__init__(keys=lambda: read_keys(str(self.file)), key_file=str(self.file))
        for name in ("anna", "bert", "carl"):
            self.put_user(name)
            self.add_secret(name, KEYS)
        self.report("proxy-0", "proxy-1")

    def add_secret(self, name: str, keys: SecretKeys) -> None:
        """Add a second secret, which ends."""
        user = self.user(name)
        sealed = keys.seal(b"another", user_id=user.id, secret_id=2, created_at_ms=7)
        sealed = replace(sealed, not_after_ms=ENDS_MS)
        self.home.put(replace(user, secrets=(user.secrets[0], sealed)).to_item())

    def user(self, name: str) -> User:
        """Return a stored user."""
        found = self.home.table.find(("user", name))
        assert found is not None
        return user_of(found)

    def report(self, *names: str) -> None:
        """Let proxies read the key file."""
        for name in names:
            keys = read_keys(str(self.file))
            self.home.proxies[name] = pb.SecurityState(
                mode="on", key_ids=keys.ids, key_checks=keys.checks
            )

    def key_ids_of(self, name: str) -> list[str]:
        """Return the keys of the secrets of a user, which all can be decrypted."""
        user, keys = self.user(name), read_keys(str(self.file))
        assert keys.open(user.secrets[0], user_id=user.id) == SECRET.encode()
        return [secret.key_id for secret in user.secrets]

    def encrypt(self, key_id: str, **body: Any) -> httpx.Response:
        """Encrypt a page of users."""
        return self.ask("POST /security:encryptSecrets", "root", keyId=key_id, **body)

    def keys(self) -> dict[str, Any]:
        """Return the answer about the keys."""
        found: dict[str, Any] = self.ask("GET /security/keys", "root").json()
        return found


def test_all_secrets_get_the_new_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_rotation, "PAGE_USERS", 2)
    world = RotationWorld(tmp_path)
    assert world.keys() == {
        "firstKeyId": "k1",
        "keys": [{"id": "k1", "secrets": 8, "held": True}],
        "lacking": [],
    }
    added = world.ask("POST /security:addKey", "root").json()
    assert added["isNew"]
    new = added["keyId"]
    assert read_keys(str(world.file)).ids == [new, "k1"]
    assert [call.action for call in world.home.recorded] == ["Create", "Create"]
    assert world.keys()["lacking"] == ["proxy-0", "proxy-1"]
    early = world.encrypt(new)
    assert early.status_code == 409
    assert "proxy-0, proxy-1" in early.json()["detail"]
    assert world.key_ids_of("anna") == ["k1", "k1"], "a refused call changes nothing"

    world.report("proxy-0", "proxy-1")
    before = world.user("anna")
    encrypted, token, pages = 0, None, 0
    while pages == 0 or token:
        page = world.encrypt(new, pageToken=token).json()
        assert page["undecryptable"] == []
        encrypted, token, pages = (
            encrypted + page["encrypted"],
            page.get("nextPageToken"),
            pages + 1,
        )
    assert (encrypted, pages) == (8, 3)
    after = world.user("anna")
    assert world.key_ids_of("anna") == [new, new]
    same = {field: getattr(before, field) for field in ("id", "roles", "entries", "changed_by")}
    assert same == {field: getattr(after, field) for field in same}
    assert [(one.id, one.created_at_ms, one.not_after_ms) for one in after.secrets] == [
        (1, 0, 0),
        (2, 7, ENDS_MS),
    ]
    assert {key["id"]: key["secrets"] for key in world.keys()["keys"]} == {new: 8, "k1": 0}
    assert world.encrypt(new).json()["encrypted"] == 0, "a repeated call changes nothing"
    assert world.ask("POST /security:addKey", "root").json()["isNew"]


def test_an_unfinished_rotation_gets_no_second_key(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    add_first_key(str(world.file), "k2", after="k1")
    assert world.ask("POST /security:addKey", "root").json() == {
        "keyId": "k2",
        "isNew": False,
        "dryRun": False,
    }
    world.report("proxy-0", "proxy-1")
    world.put_user("dora", keys=read_keys(str(world.file)))
    assert not world.ask("POST /security:addKey", "root").json()["isNew"], "some have the old key"
    world.encrypt("k2")
    planned = world.ask("POST /security:addKey?dryRun=true", "root").json()
    assert (planned["isNew"], planned["dryRun"]) == (True, True)
    assert read_keys(str(world.file)).ids == ["k2", "k1"]


def test_only_the_first_key_of_the_process_encrypts(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    assert world.encrypt("k9").status_code == 409
    world.home.proxies["proxy-1"] = None
    add_first_key(str(world.file), "k2", after="k1")
    world.report("proxy-0")
    refused = world.encrypt("k2")
    assert "proxy-1: the key k2 is not reported" in refused.json()["detail"]
    assert world.encrypt("k2", force=True).json()["encrypted"] == 8


def test_another_key_with_the_same_id_is_not_the_first_key(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    add_first_key(str(world.file), "k2", after="k1")
    world.report("proxy-0")
    other = SecretKeys({"k2": b"x" * 32, "k1": b"k" * 32})
    world.home.proxies["proxy-1"] = pb.SecurityState(
        mode="on", key_ids=other.ids, key_checks=other.checks
    )
    refused = world.encrypt("k2")
    assert refused.status_code == 409
    assert "proxy-1 with another key of the same id" in refused.json()["detail"]


def test_a_process_that_has_not_read_its_new_key_adds_no_second_one(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    stale = read_keys(str(world.file))
    world.app.state.secret_keys = lambda: stale
    added = [world.ask("POST /security:addKey", "root").json() for _ in range(2)]
    assert [one["isNew"] for one in added] == [True, False]
    assert {one["keyId"] for one in added} == {read_keys(str(world.file)).first}


def test_a_secret_without_a_key_is_named_and_stays(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    world.add_secret("bert", SecretKeys({"lost": b"l" * 32}))
    add_first_key(str(world.file), "k2", after="k1")
    world.report("proxy-0", "proxy-1")
    assert {"id": "lost", "secrets": 1, "held": False} in world.keys()["keys"]
    page = world.encrypt("k2").json()
    assert (page["encrypted"], page["undecryptable"]) == (7, ["bert"])
    assert world.key_ids_of("bert") == ["k2", "lost"]


def test_a_change_of_another_administrator_is_kept(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    add_first_key(str(world.file), "k2", after="k1")
    world.report("proxy-0", "proxy-1")
    changes = [1]

    async def disable() -> None:
        if changes:
            changes.clear()
            world.home.put(replace(world.user("anna"), is_enabled=False).to_item())

    world.home.before_change = disable
    assert world.encrypt("k2").json()["encrypted"] == 8
    assert not world.user("anna").is_enabled
    assert world.key_ids_of("anna") == ["k2", "k2"]


def test_a_full_key_file_names_the_unused_keys(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    unused = [f"o{n}" for n in range(KEYS_MAX - 1)]
    lines = [f"{key_id} {64 * '0'}\n" for key_id in unused]
    world.file.write_text(world.file.read_text() + "".join(lines))
    full = world.file.read_text()
    for operation in ("POST /security:addKey?dryRun=true", "POST /security:addKey"):
        answer = world.ask(operation, "root")
        assert answer.status_code == 409
        assert (
            "Remove lines of keys that encrypt no secret from the files of all proxies"
            in answer.text
        )
        assert f"then repeat this: {' '.join(unused)}. A backup" in answer.text
    assert world.file.read_text() == full
    world.file.write_text(full.replace(lines[-1], ""))
    assert world.ask("POST /security:addKey", "root").json()["isNew"]
    assert len(world.file.read_text().splitlines()) == KEYS_MAX


def test_a_file_that_cannot_be_written_names_the_remedy(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    draft = world.file.with_name(f"{world.file.name}.draft")
    draft.mkdir()  # It takes the name of the file that would replace the key file.
    answer = world.ask("POST /security:addKey", "root")
    assert answer.status_code == 409
    assert "security.keyRotation" in answer.json()["detail"]
    world.app.state.key_file = str(tmp_path / "none")
    assert "cannot be read" in world.ask("POST /security:addKey", "root").json()["detail"]


def test_a_process_without_a_key_file_rotates_nothing(tmp_path: Path) -> None:
    world = RotationWorld(tmp_path)
    world.app.state.secret_keys = lambda: None
    for operation in ("GET /security/keys", "POST /security:addKey"):
        assert "security_key_file" in world.ask(operation, "root").json()["detail"]


# ---------------------------------------------------------------- two admin processes


class OtherAdmin(RotationWorld):
    """Another admin process of the same cluster, with a key file of its own."""

    def __init__(self, folder: Path, first: RotationWorld) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.home = first.home
        self.app.dependency_overrides[brokers_of] = lambda: first.home
        self.keys_of_file = KeyFile(str(self.file), self.clock.monotonic_ms)
        self.app.state.secret_keys = self.keys_of_file.keys
        copy = AdminSecurityCopy(first.home.client.find, self.clock.monotonic_ms, floor=Mode.OFF)
        self.door._identities = IdentityCheck(
            copy,
            self.keys_of_file.keys,
            wall_ms=self.clock.wall_ms,
            monotonic_ms=self.clock.monotonic_ms,
        )


def rotated(folder: Path) -> tuple[RotationWorld, OtherAdmin]:
    """Return the process that has rotated the key, and one with the old key file."""
    world = RotationWorld(folder)
    other = OtherAdmin(folder / "other", world)
    assert other.ask("GET /users", "root").status_code == 200
    add_first_key(str(world.file), "k2", after="k1")
    world.report("proxy-0", "proxy-1")
    assert world.encrypt("k2").status_code == 200
    return world, other


@pytest.mark.parametrize("operation", ["PUT /users/dora", "POST /users/anna:rotate"])
def test_an_admin_process_with_an_old_key_file_makes_no_secret(
    tmp_path: Path, operation: str
) -> None:
    world, other = rotated(tmp_path)
    token = world.create("root")["token"]
    # Anna has two secrets, so a rotation of hers needs force.
    body = {"force": True} if operation.endswith(":rotate") else {}
    refused = other.ask(operation, token, **body)
    assert refused.status_code == 503, refused.text
    assert "lacks the key k2" in refused.json()["detail"]
    assert {key["id"]: key["secrets"] for key in world.keys()["keys"]} == {"k2": 8, "k1": 0}


def test_an_admin_process_reads_its_key_file_again_for_an_unknown_key(tmp_path: Path) -> None:
    world, other = rotated(tmp_path)
    assert other.ask("GET /users", "root").status_code == 503
    shutil.copy(world.file, other.file)
    assert other.ask("PUT /users/dora", "root").status_code == 200, "within a second"
    assert [secret.key_id for secret in other.user("dora").secrets] == ["k2"]


def test_new_secrets_keep_the_former_key_until_all_processes_have_the_new_one(
    tmp_path: Path,
) -> None:
    world, _ = rotated(tmp_path)
    add_first_key(str(world.file), "k3", after="k2")
    assert world.ask("PUT /users/dora", "root").status_code == 200
    assert [secret.key_id for secret in world.user("dora").secrets] == ["k2"]
    world.report("proxy-0", "proxy-1")
    world.encrypt("k3")
    assert world.ask("PUT /users/emil", "root").status_code == 200
    assert {world.user(name).secrets[0].key_id for name in ("dora", "emil")} == {"k3"}


def test_a_change_of_the_mode_keeps_the_key_of_new_secrets(tmp_path: Path) -> None:
    world, _ = rotated(tmp_path)
    assert world.ask("PUT /security", "root", mode="permissive").status_code == 200
    assert world.ask("PUT /users/dora", "root").status_code == 200
    assert sealing_key_of(world.home.table.find(("security", ""))) == SealingKey(
        "k2", read_keys(str(world.file)).check_of("k2")
    )
