"""Tokens of Kubernetes service accounts: real processes, the command line and the Java client."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.clients.client_process import (
    JAVA_CLASSES,
    needs,
    run_java_client,
    staying_client,
)
from tests.support.eventually import eventually
from tests.support.issuer import ISSUER, claims_of, jwk, p256_key, rsa_key, token, write_keys
from tests.support.processes.processes import Standalone, standalone
from tidemill.security.kubernetes_tokens import LEEWAY_S

UNUSED = ("unused", "an unused secret")
ACCOUNT = "shop/orders"

java = needs("java", JAVA_CLASSES)


class WithIssuer(NamedTuple):
    """A standalone that knows the keys of an issuer, and the user `shop` of a service account."""

    running: Standalone
    folder: Path

    def run(self, *arguments: str) -> Any:
        """Run a command line; return its JSON."""
        line = [sys.executable, "-m", "tidemill", "--admin", self.running.admin, "-o", "json"]
        ended = subprocess.run(
            [*line, *arguments],
            env={"HOME": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def token_file(self, name: str, *, ends_s: float = 3_600, **options: Any) -> Path:
        """Write a token that ends after a time, as kubelet does; return the file."""
        now_s = int(time.time())
        claims = claims_of(ACCOUNT, now_s=now_s - 60, exp=int(now_s + ends_s))
        file, new = self.folder / name, self.folder / f"{name}.new"
        new.write_text(token(claims, **options))
        new.chmod(0o600)
        new.rename(file)
        return file


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithIssuer]:
    folder = tmp_path_factory.mktemp("issued")
    keys = write_keys(folder, jwk(rsa_key()))
    options = (f"--oidc-issuer={ISSUER}", f"--oidc-keys={keys}")
    with standalone(folder / "data", "--proxies=2", *options) as running:
        made = WithIssuer(running, folder)
        made.run("security", "enable")
        made.run(
            "user",
            "create",
            "shop",
            "--producer=shop*",
            "--consumer=shop*:shop*",
            "--role=viewer",
            f"--service-account={ACCOUNT}",
        )
        for resource in ("Topic:shop*", "Group:shop*"):
            made.run("acl", "allow", "shop", resource, "Create")
        yield made


def test_the_command_line_uses_a_token(issued: WithIssuer) -> None:
    shown = issued.run("--token-file", str(issued.token_file("cli")), "topic", "list")
    assert isinstance(shown, list)
    listed = issued.run("audit", "list", "--kind", "change", "--resource", "User:shop")
    assert listed
    assert issued.run("user", "show", "shop")["serviceAccounts"] == [ACCOUNT]
    issued.run("user", "set", "shop", "--service-account", ACCOUNT, "--service-account=shop/b")
    assert issued.run("user", "show", "shop")["serviceAccounts"] == ["shop/b", ACCOUNT]
    assert issued.run("user", "create", "other")["serviceAccounts"] == []


@java
def test_a_java_client_sends_and_receives_with_a_token(issued: WithIssuer, tmp_path: Path) -> None:
    facts = run_java_client(
        tmp_path,
        "roundTrip",
        issued.running.grpc,
        topic="shop-java",
        group="shop-java",
        credentials=UNUSED,
        session_token_file=issued.token_file("java"),
    )
    sent, received = ({one["id"] for one in facts.of(fact)} for fact in ("sent", "received"))
    assert sent == received
    assert sent


@java
@pytest.mark.parametrize("kind", ["forged", "ended"])
def test_a_java_client_with_a_wrong_token_is_refused(
    issued: WithIssuer, tmp_path: Path, kind: str
) -> None:
    forged, ended = {"key": rsa_key(1)}, {"ends_s": -LEEWAY_S - 1}
    options: dict[str, Any] = forged if kind == "forged" else ended
    with pytest.raises(AssertionError, match=r"failed|did not end"):
        run_java_client(
            tmp_path,
            "roundTrip",
            issued.running.grpc,
            topic="shop-refused",
            group="shop-refused",
            credentials=UNUSED,
            session_token_file=issued.token_file(kind, **options),
        )
    assert "shop-refused" not in {topic["name"] for topic in issued.run("topic", "list")}


@java
def test_a_push_consumer_goes_on_with_the_next_token_and_the_next_key(
    issued: WithIssuer, tmp_path: Path
) -> None:
    """Its telemetry stream ends with the first token, and it opens another one."""
    name = "shop-renewed"
    issued.run("topic", "create", name)
    issued.run("group", "create", name)
    ends_at_s = time.time() + 20
    file = issued.token_file("renewed", ends_s=20 - LEEWAY_S)
    staying = staying_client(
        "java",
        tmp_path,
        issued.running.grpc,
        topic=name,
        group=name,
        credentials=UNUSED,
        session_token_file=file,
    )
    with staying as client:
        issued.run("message", "send", name, "first")
        client.wait_for("received", body="first")
        write_keys(issued.folder, jwk(rsa_key()), jwk(p256_key(), "k2"))
        issued.token_file("renewed", key=p256_key(), kid="k2")
        eventually(lambda: time.time() > ends_at_s + 2)
        issued.run("message", "send", name, "second")
        client.wait_for("received", body="second")
        [listed] = issued.run("client", "list", "--group", name)["clients"]
        # The question needs a telemetry stream.
        assert eventually(lambda: issued.run("client", "stack", listed["clientId"]))["stack"]
