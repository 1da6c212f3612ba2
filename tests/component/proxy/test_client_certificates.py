"""Certificates of clients as identities, over real TLS connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.component.proxy.test_rights import PUB, entries
from tests.support.client_certificates import Authority
from tests.support.issuer import NOW_S, jwk, rsa_key, token, write_keys
from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld, message
from tidemill.message.client_key import ClientKey
from tidemill.proxy.app import front_tls
from tidemill.proxy.server import access
from tidemill.proxy.server.grpc_server import GrpcServer
from tidemill.proxy.settings import ProxySettings
from tidemill.security.bans import BanKind
from tidemill.security.issuer_keys import IssuerKeys, KeySource
from tidemill.security.table import Mode
from tidemill.security.tokens import NamedToken, make_token
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc
from tidemill.transport.aio.tls import newest_context

URI = "spiffe://cluster/ns/shop/sa/orders"
NEEDED = "user orders needs one of its certificates, and this connection has another one or none"
UNKNOWN = (v2.UNAUTHORIZED, "no credentials, and no user lists a name of the certificate")


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 0)
    monkeypatch.setattr(access, "WRONG_ANSWER_S", 0)


class Wire:
    """A proxy that requires certificates, with its users."""

    def __init__(self, users: AccessWorld, authority: Authority, address: str) -> None:
        self.users = users
        self._authority = authority
        self._address = address

    @contextlib.asynccontextmanager
    async def client(self, **names: Sequence[str]) -> AsyncIterator[Client]:
        """Connect with a certificate that has these names."""
        certificate, key = self._authority.issue("client", **names)
        trusted = self._authority.certificate
        credentials = grpc.ssl_channel_credentials(trusted, key, certificate)
        async with grpc.aio.secure_channel(self._address, credentials) as channel:
            yield Client(channel)


class Client:
    """One connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = service_pb2_grpc.MessagingServiceStub(channel)

    async def send(self, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Send a message; return the code and the text of the answer."""
        answer = await self.stub.SendMessage(
            service.SendMessageRequest(messages=[message()]),
            metadata=tuple({**HEADERS, **(headers or {})}.items()),
        )
        return answer.status.code, answer.status.message


def run(folder: Path, scenario: Callable[[Wire], Awaitable[None]]) -> None:
    authority = Authority(folder)
    authority.issue("server", dns_names=["localhost"])
    settings = ProxySettings(
        grpc_port=0,
        tls="required",
        tls_certificate_file=str(folder / "server.crt"),
        tls_key_file=str(folder / "server.key"),
        tls_client_ca_file=authority.file,
    )
    front = front_tls(settings)
    assert front is not None

    async def main() -> None:
        async with (
            asyncio.timeout(30),
            MemoryBroker().serving() as broker,
            ProxyWorld.open(broker) as world,
        ):
            await world.put_topic()
            keys = IssuerKeys(KeySource(write_keys(folder, jwk(rsa_key()))), lambda: 0)
            users = AccessWorld(issuer_keys=keys)
            users.now_ms = NOW_S * 1_000
            server = GrpcServer(
                world.methods, world.boundary, on_lost=lambda _key: None, gate=users.gate
            )
            async with server.serving(settings, newest_context(front)):
                await scenario(Wire(users, authority, server.address))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (URI, {"uris": [URI], "common_names": ["other"]}),
        ("orders.shop.svc", {"dns_names": ["x", "orders.shop.svc"]}),
        ("Orders Service", {"common_names": ["Orders Service"]}),
    ],
    ids=["uri", "dns", "common name"],
)
def test_a_certificate_is_a_credential(
    tmp_path: Path, listed: str, names: dict[str, list[str]]
) -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.put_user("orders", *entries([PUB]), certificates=[listed])
        async with wire.client(**names) as client:
            assert (await client.send())[0] == v2.OK
            assert wire.users.gate.credentials.authentications["certificate", "verified"] == 1
            wire.users.put_user("orders", is_same=True, certificates=[listed])
            assert "may not Pub" in (await client.send())[1]
            wire.users.put_user(
                "orders", *entries([PUB]), is_same=True, is_enabled=False, certificates=[listed]
            )
            assert (await client.send())[1] == "user orders is disabled"
            wire.users.put_user("orders", *entries([PUB]), is_same=True)
            assert await client.send() == UNKNOWN

    run(tmp_path, scenario)


def test_uri_names_come_before_dns_names_and_the_common_name(tmp_path: Path) -> None:
    async def scenario(wire: Wire) -> None:
        users = wire.users
        for name in ("uri", "dns", "cn"):
            users.put_user(name, certificates=[URI if name == "uri" else name])
        async with wire.client(uris=[URI], dns_names=["dns"], common_names=["cn"]) as client:
            assert (await client.send())[1].startswith("user uri may not")
            users.delete_user("uri")
            assert (await client.send())[1].startswith("user dns may not")
            users.delete_user("dns")
            assert (await client.send())[1].startswith("user cn may not")
            users.delete_user("cn")
            assert await client.send() == UNKNOWN

    run(tmp_path, scenario)


def test_two_common_names_are_none(tmp_path: Path) -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.put_user("orders", *entries([PUB]), certificates=["orders"])
        async with wire.client(common_names=["orders", "other"]) as client:
            assert await client.send() == (v2.UNAUTHORIZED, "no credentials")

    run(tmp_path, scenario)


def test_a_name_of_two_users_is_refused(tmp_path: Path) -> None:
    async def scenario(wire: Wire) -> None:
        for name in ("a", "b"):
            wire.users.put_user(name, *entries([PUB]), certificates=["shared"])
        async with wire.client(common_names=["shared"]) as client:
            assert "the users a, b list the certificate shared" in (await client.send())[1]

    run(tmp_path, scenario)


def test_a_user_with_certificates_needs_one_for_each_credential(tmp_path: Path) -> None:
    """The refusal names the user only after a correct credential."""

    async def scenario(wire: Wire) -> None:
        users = wire.users
        users.put_user(
            "orders", *entries([PUB]), certificates=["own", "spare"], accounts=["shop/orders"]
        )
        made = make_token()
        item = NamedToken(id=made.id, name="ci", user="orders", user_id=1, sha256=made.sha256)
        users.put_item(item.to_item())
        shown = [
            signed("orders"),
            {"authorization": f"Bearer {made.text}"},
            {"x-mq-session-token": token()},
        ]
        async with (
            wire.client(common_names=["spare"]) as own,
            wire.client(common_names=["other"]) as other,
        ):
            for headers in shown:
                # The header is remembered for the connection of the user, and then copied.
                assert (await own.send(headers))[0] == v2.OK
                assert (await own.send(headers))[0] == v2.OK
                assert await other.send(headers) == (v2.UNAUTHORIZED, NEEDED)
                assert await other.send(headers) == (v2.UNAUTHORIZED, NEEDED)
            wrong = (v2.UNAUTHORIZED, "the access key or the signature is wrong")
            assert await other.send(signed("orders", "a wrong secret")) == wrong
            users.put_ban(BanKind.USER, "orders", user_id=1)
            assert await other.send(signed("orders")) == (v2.UNAUTHORIZED, NEEDED)
            assert "banned" in (await own.send(signed("orders")))[1]

    run(tmp_path, scenario)


def test_another_credential_decides_before_the_certificate(tmp_path: Path) -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.put_user("orders", *entries([PUB]), certificates=["orders"])
        wire.users.put_user("other")
        async with wire.client(common_names=["orders"]) as client:
            assert (await client.send(signed("other")))[1].startswith("user other may not")
            wrong = (v2.UNAUTHORIZED, "the access key or the signature is wrong")
            assert await client.send(signed("other", "a wrong secret")) == wrong
            for malformed in ("x", "Bearer", "Basic b3JkZXJz", "MQv2-HMAC-SHA1 Signature=0"):
                code, text = await client.send({"authorization": malformed})
                assert (code, "malformed" in text) == (v2.UNAUTHORIZED, True)
            # Python sends an empty access key without credentials.
            assert (await client.send(signed("")))[0] == v2.OK
            wire.users.set_mode(Mode.OFF)
            assert (await client.send(signed("other")))[0] == v2.OK

    run(tmp_path, scenario)


def test_a_removed_certificate_ends_the_streams_of_its_connection(tmp_path: Path) -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.put_user("orders", *entries([PUB]), certificates=["orders"])
        async with wire.client(common_names=["orders"]) as client:
            settings = service.TelemetryCommand(
                settings=v2.Settings(client_type=v2.PRODUCER, publishing=v2.Publishing())
            )
            stream = client.stub.Telemetry(metadata=tuple(HEADERS.items()))
            await stream.write(settings)
            assert (await stream.read()).WhichOneof("command") == "settings"
            wire.users.put_user("orders", *entries([PUB]), is_same=True, certificates=["new"])
            ended = await stream.read()
            assert (ended.status.code, ended.WhichOneof("command")) == (v2.UNAUTHORIZED, None)

    run(tmp_path, scenario)


def test_a_stream_ends_when_another_user_lists_an_earlier_name_of_its_certificate(
    tmp_path: Path,
) -> None:
    """The client holds messages as the former user, which it no longer is (S-8, S-11)."""

    async def scenario(wire: Wire) -> None:
        revoked: list[ClientKey] = []
        wire.users.gate.revoked.on_revoked = lambda client, _lost: revoked.append(client)
        wire.users.put_user("orders", *entries([PUB]), certificates=["orders"])
        async with wire.client(common_names=["orders"], uris=[URI]) as client:
            settings = service.TelemetryCommand(
                settings=v2.Settings(client_type=v2.PRODUCER, publishing=v2.Publishing())
            )
            stream = client.stub.Telemetry(metadata=tuple(HEADERS.items()))
            await stream.write(settings)
            assert (await stream.read()).WhichOneof("command") == "settings"
            wire.users.put_user("other", *entries([PUB]), certificates=[URI])
            async with asyncio.timeout(5):
                ended = await stream.read()
            assert ended is grpc.aio.EOF or ended.WhichOneof("command") is None
            assert revoked == [ClientKey(HEADERS["x-mq-client-id"], 1)]

    run(tmp_path, scenario)
