"""The REST API of a standalone in the security mode `on`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.support.clients.api import METADATA, message
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

ROCKETMQ_USERS = """\
#UserName         #Password               #UserType               #UserStatus
orders            12345678                Normal                  enable
payer             87654321                Normal                  enable
"""
ROCKETMQ_ACLS = """\
#Subject       #PolicyType  #Resource     #Actions       #SourceIp  #Decision
User:orders    Custom       Topic:orders  [Pub, Create]  []         Allow
User:orders    Default      Topic:*       [Pub]          []         Deny
User:payer     Default      Topic:*       [Pub]          []         Deny
"""


def tidemill(running: Standalone, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tidemill", "--admin", running.admin, "-o", "json", *arguments]
    return subprocess.run(
        line, env={"HOME": str(home)}, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_mode_on_needs_users_and_rights(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        url = f"{running.admin}/api/v1"
        with httpx.Client(trust_env=False, timeout=30) as http:
            assert http.put(f"{url}/topics/orders", json={}).status_code == 200
            enabled = tidemill(running, tmp_path, "security", "enable")
            assert enabled.returncode == 0
            answer = json.loads(enabled.stdout)
            applied = {(proxy["mode"], proxy["version"]) for proxy in answer["proxies"]}
            assert applied == {("on", answer["version"])}
            eventually(lambda: http.get(f"{url}/topics").status_code == 401)
            assert tidemill(running, tmp_path, "topic", "create", "owned").returncode == 0
            listed = json.loads(tidemill(running, tmp_path, "topic", "list").stdout)
            by_name = {each["name"]: each for each in listed}
            [record] = json.loads(
                tidemill(running, tmp_path, "audit", "list", "--resource", "Topic:owned").stdout
            )
            assert by_name["owned"]["createdBy"] == record["user"]
            # Before the mode, there was no user.
            assert "createdBy" not in by_name["orders"]
            assert by_name["orders"]["createdByUnknown"] == "created without a user"
            made = tidemill(running, tmp_path, "user", "create", "eve", "--role", "viewer")
            assert made.returncode == 0, made.stderr
            secret = json.loads(made.stdout)["secret"]
            eve = ("eve", secret)
            assert http.get(f"{url}/topics", auth=eve).json()["topics"]
            assert http.get(f"{url}/topics/orders", auth=eve).status_code == 200
            assert http.delete(f"{url}/topics/orders", auth=eve).status_code == 403
            assert http.put(f"{url}/security", json={"mode": "off"}, auth=eve).status_code == 403
            assert http.get(f"{url}/topics", auth=("eve", "wrong")).status_code == 401
            assert http.get(f"{url}/topics").status_code == 401
            secret_file = tmp_path / "eve"
            secret_file.write_text(secret)
            named = ("--user", "eve", "--secret-file", str(secret_file))
            opened = tidemill(running, tmp_path, *named, "topic", "list")
            assert opened.returncode == 2, "others may read the file"
            secret_file.chmod(0o600)
            assert tidemill(running, tmp_path, *named, "topic", "list").returncode == 0
            refused = tidemill(running, tmp_path, *named, "user", "create", "mallory")
            assert refused.returncode == 1
            assert "super user" in refused.stderr
            audit = http.get(f"{url}/audit", auth=("eve", secret))
            assert audit.status_code == 403
            records = json.loads(tidemill(running, tmp_path, "audit", "list").stdout)
            assert "eve" in json.dumps(records)
            assert tidemill(running, tmp_path, "security", "disable", "--yes").returncode == 0
            eventually(lambda: http.get(f"{url}/topics").status_code == 200)


def test_a_role_has_the_rights_of_its_templates(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:

        def shown(*arguments: str) -> Any:
            ended = tidemill(running, tmp_path, *arguments)
            assert ended.returncode == 0, ended.stderr
            return json.loads(ended.stdout)

        def may(action: str, resource: str) -> bool:
            check = ("acl", "check", "--user", "eve", "--action", action, *resource.split())
            return tidemill(running, tmp_path, *check).returncode == 0

        shown("role", "create", "sellers", "--consumer", "billing:orders")
        shown("user", "create", "eve", "--role", "sellers")
        assert may("sub", "--topic orders")
        assert may("sub", "--group billing")
        assert not may("pub", "--topic orders")
        shown("role", "set", "sellers", "--producer", "orders", "--dry-run")
        assert not may("pub", "--topic orders")
        shown("role", "set", "sellers", "--producer", "orders")
        assert may("pub", "--topic orders")
        assert not may("sub", "--group billing")
        assert tidemill(running, tmp_path, "role", "set", "sellers").returncode == 2
        assert tidemill(running, tmp_path, "role", "set", "none", "--producer", "t").returncode == 1


async def send(running: Standalone, token: str) -> int:
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        call = channel.unary_unary(
            "/apache.rocketmq.v2.MessagingService/SendMessage",
            request_serializer=service.SendMessageRequest.SerializeToString,
            response_deserializer=service.SendMessageResponse.FromString,
        )
        headers = (*METADATA, ("authorization", f"Bearer {token}"))
        request = service.SendMessageRequest(messages=[message("orders", b"m")])
        return int((await call(request, metadata=headers, timeout=20)).status.code)


def test_a_script_uses_a_named_token_at_both_doors(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        with httpx.Client(trust_env=False, timeout=30) as http:
            url = f"{running.admin}/api/v1"
            assert http.put(f"{url}/topics/orders", json={}).status_code == 200
            assert tidemill(running, tmp_path, "security", "enable").returncode == 0
            eventually(lambda: http.get(f"{url}/topics").status_code == 401)
        user = ("user", "create", "orders", "--producer", "orders")
        assert tidemill(running, tmp_path, *user).returncode == 0
        create = ("token", "create", "ci", "--user", "orders", "--expires-after", "1d")
        planned = tidemill(running, tmp_path, *create, "--dry-run")
        assert "token" not in json.loads(planned.stdout)
        made = json.loads(tidemill(running, tmp_path, *create).stdout)
        token = made["token"]
        eventually(lambda: asyncio.run(send(running, token)) == v2.OK)
        assert asyncio.run(send(running, f"{token[:-1]}!")) == v2.UNAUTHORIZED
        token_file = tmp_path / "ci.token"
        token_file.write_text(token)
        named = ("--token-file", str(token_file))
        assert tidemill(running, tmp_path, *named, "topic", "list").returncode == 2, "too open"
        token_file.chmod(0o600)
        assert tidemill(running, tmp_path, *named, "topic", "list").returncode == 0
        refused = tidemill(running, tmp_path, *named, "token", "create", "other")
        assert refused.returncode == 1
        saved = tmp_path / "elsewhere" / ".config" / "tidemill" / "credentials"
        saved.parent.mkdir(parents=True)
        saved.touch(0o600)
        saved.write_text(f"{token}\n")
        assert tidemill(running, tmp_path / "elsewhere", "topic", "list").returncode == 0
        [listed] = json.loads(tidemill(running, tmp_path, "token", "list").stdout)
        assert (listed["name"], listed["user"]) == ("ci", "orders")
        assert tidemill(running, tmp_path, "token", "delete", "ci", "--yes").returncode == 0
        eventually(lambda: asyncio.run(send(running, token)) == v2.UNAUTHORIZED)
        ended = tidemill(running, tmp_path, *named, "topic", "list")
        assert (ended.returncode, "the token is wrong" in ended.stderr) == (1, True)
        records = json.loads(tidemill(running, tmp_path, "audit", "list").stdout)
        assert token[-43:] not in json.dumps(records)
        assert token[-43:] not in running.log.read_text()


def test_a_browser_logs_in_and_out(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        assert tidemill(running, tmp_path, "security", "enable").returncode == 0
        user, secret, _ = (tmp_path / ".config" / "tidemill" / "credentials").read_text().split()
        with httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=30) as http:
            eventually(lambda: http.get("/session").status_code == 401)
            assert http.post("/session", auth=(user, "wrong")).status_code == 401
            assert not http.cookies
            assert http.post("/session", auth=(user, secret)).json()["via"] == "session"
            assert http.get("/session").json()["user"] == user
            own = {"Origin": running.admin}
            assert http.put("/topics/orders", json={}).status_code == 403, "no origin"
            assert http.put("/topics/orders", json={}, headers=own).status_code == 200
            [record, *_] = http.get("/audit?kind=change").json()["records"]
            assert (record["user"], record["via"]) == (user, "session")
            cookie = dict(http.cookies)
            assert http.delete("/session", headers=own).status_code == 204
            assert not http.cookies
            http.cookies.update(cookie)
            assert http.get("/session").status_code == 401
            assert next(iter(cookie.values())) not in running.log.read_text()


def test_the_users_of_rocketmq_are_imported(tmp_path: Path) -> None:
    files = []
    for name, text in (("users", ROCKETMQ_USERS), ("acls", ROCKETMQ_ACLS)):
        file = tmp_path / name
        file.write_text(text)
        file.chmod(0o600)
        files.append(str(file))
    with standalone(tmp_path / "data") as running:
        assert tidemill(running, tmp_path, "security", "enable").returncode == 0
        weak = tidemill(running, tmp_path, "security", "import", *files)
        assert weak.returncode == 2
        assert "--allow-weak" in weak.stderr
        assert "12345678" not in weak.stderr
        line = ("security", "import", *files, "--allow-weak")
        planned = json.loads(tidemill(running, tmp_path, *line, "--dry-run").stdout)
        assert {row["result"] for row in planned} == {"would be created"}
        assert len(json.loads(tidemill(running, tmp_path, "user", "list").stdout)) == 1
        made = json.loads(tidemill(running, tmp_path, *line).stdout)
        assert [(row["user"], row["role"], row["result"]) for row in made] == [
            ("orders", "orders.default", "created"),
            ("payer", "orders.default", "created"),
        ]
        again = json.loads(tidemill(running, tmp_path, *line).stdout)
        assert {row["result"] for row in again} == {"exists, unchanged"}
        for topic in ("orders", "payments"):
            assert tidemill(running, tmp_path, "topic", "create", topic).returncode == 0
        with httpx.Client(trust_env=False, timeout=30, auth=("orders", "12345678")) as http:
            url = f"{running.admin}/api/v1"
            eventually(lambda: http.get(f"{url}/session").status_code == 200)
            for topic, status in (("orders", 200), ("payments", 403)):
                sent = http.post(f"{url}/topics/{topic}/messages", json={"body": "m"})
                assert sent.status_code == status, sent.text
        checked = tidemill(
            running, tmp_path, "acl", "check", "--user=payer", "--action=Pub", "--topic=orders"
        )
        assert "orders.default" in checked.stdout
