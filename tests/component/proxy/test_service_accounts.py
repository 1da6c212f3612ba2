"""Tokens of Kubernetes service accounts at the port for clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.component.proxy.test_rights import PUB, SEND, Client, entries
from tests.support.issuer import NOW_S, claims_of, jwk, p256_key, rsa_key, token, write_keys
from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld, run
from tidemill.common.errors import TokenEnded, WrongCredentials
from tidemill.message import limits
from tidemill.message.client_key import ClientKey
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.proxy.server import access, pipeline_table
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.pipeline_source import PipelineMethod, pipeline_methods
from tidemill.security import kubernetes_tokens
from tidemill.security.acl import parse_entry
from tidemill.security.bans import BanKind
from tidemill.security.failure_buckets import CHECKS_MAX
from tidemill.security.issuer_keys import IssuerKeys, KeySource
from tidemill.security.kubernetes_tokens import LEEWAY_S
from tidemill.security.table import Mode
from tidemill.security.tokens import NamedToken, make_token
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1.pipeline_pb2 import GetQueuesRequest
from tidemill.transport.grpc.status import RpcError

WRONG = (v2.UNAUTHORIZED, "the Kubernetes token is wrong")
SENT = v2.OK
Scenario = Callable[[AccessWorld, Client], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 0)
    monkeypatch.setattr(access, "WRONG_ANSWER_S", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(write_keys(tmp_path, jwk(rsa_key())))


def in_world(file: Path | None, scenario: Scenario, mode: Mode = Mode.ON) -> None:
    """Run a scenario with the user `orders` of shop/orders, who may send."""

    async def with_topic(world: ProxyWorld) -> None:
        await world.put_topic()
        keys = None if file is None else IssuerKeys(KeySource(str(file)), lambda: 0)
        users = AccessWorld(mode, keys)
        users.now_ms = NOW_S * 1_000
        users.put_user("orders", *entries([PUB]), accounts=["shop/orders"])
        if keys is None:
            await scenario(users, Client(world, users))
            return
        async with keys.running():
            await scenario(users, Client(world, users))

    run(with_topic)


def session(text: str) -> dict[str, str]:
    return {"x-mq-session-token": text}


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_a_token_is_accepted_in_both_headers(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.keys = None  # Nothing is decrypted.
        for headers in (session(token()), bearer(token()), session(f"{token()},{token()}")):
            assert (await client.code(SEND, headers))[0] == SENT
        assert users.gate.credentials.authentications["kubernetes", "verified"] == 3
        other = session(token(claims_of("shop/other")))
        refused = (v2.UNAUTHORIZED, "no user lists the service account shop/other")
        assert await client.code(SEND, other) == refused
        assert users.gate.credentials.authentications["kubernetes", "refused"] == 1

    in_world(file, scenario)


def test_without_an_issuer_the_session_token_is_ignored() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        code, text = await client.code(SEND, session(token()))
        assert (code, text) == (v2.UNAUTHORIZED, "no credentials")
        assert (await client.code(SEND, {**session("x"), **signed("orders")}))[0] == SENT
        assert await client.code(SEND, bearer(token())) == (v2.UNAUTHORIZED, "the token is wrong")

    in_world(None, scenario)


def test_the_first_credential_decides(file: Path) -> None:
    """A failure does not fall through to the next credential."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("other")
        good, wrong = session(token()), session(token(key=rsa_key(1)))
        assert await client.code(SEND, {**wrong, **signed("orders")}) == WRONG
        assert (await client.code(SEND, {**good, **signed("orders", "a wrong secret")}))[0] == SENT
        code, text = await client.code(SEND, {**good, **signed("other")})
        assert code == SENT, text
        code, text = await client.code(SEND, {**session(""), **signed("other")})
        assert text.startswith("user other may not Pub on Topic:topic")
        assert (await client.code(SEND, {**session(" "), **signed("orders")}))[0] == SENT
        users.put_user("orders", *entries([PUB]))
        code, text = await client.code(SEND, {**good, **signed("orders")})
        assert text == "no user lists the service account shop/orders"

    in_world(file, scenario)


def test_named_tokens_stay_valid_beside_them(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        made = make_token()
        item = NamedToken(id=made.id, name="ci", user="orders", user_id=1, sha256=made.sha256)
        users.put_item(item.to_item())
        assert (await client.code(SEND, bearer(made.text)))[0] == SENT
        wrong = await client.code(SEND, bearer(make_token().text))
        assert wrong == (v2.UNAUTHORIZED, "the token is wrong")

    in_world(file, scenario)


def test_each_call_checks_the_user_again(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        own = session(token())

        async def text() -> str:
            return (await client.code(SEND, own))[1]

        assert (await client.code(SEND, own))[0] == SENT
        users.put_user("orders", is_same=True, accounts=["shop/orders"])
        assert (await text()).startswith("user orders may not Pub on Topic:topic")
        users.put_user(
            "orders", *entries([PUB]), is_same=True, accounts=["shop/orders"], is_enabled=False
        )
        assert await text() == "user orders is disabled"
        users.put_user("orders", *entries([PUB]), is_same=True, accounts=["shop/orders"])
        users.put_user("second", accounts=["shop/orders"])
        assert "the users orders, second list the service account" in await text()
        users.delete_user("second")
        assert (await client.code(SEND, own))[0] == SENT
        users.put_ban(BanKind.USER, "orders", user_id=1)
        assert "banned" in await text()
        users.delete_item("ban", "user:orders")
        assert (await client.code(SEND, own))[0] == SENT
        users.delete_user("orders")
        assert await text() == "no user lists the service account shop/orders"

    in_world(file, scenario)


def test_modes_count_for_tokens_too(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        wrong = session(token(key=rsa_key(1)))
        users.set_mode(Mode.PERMISSIVE)
        assert (await client.code(SEND, wrong))[0] == SENT
        assert users.gate.accesses["send_message", "would_refuse"] > 0
        refused = users.gate.credentials.authentications["kubernetes", "refused"]
        users.set_mode(Mode.OFF)
        assert (await client.code(SEND, wrong))[0] == SENT
        assert users.gate.credentials.authentications["kubernetes", "refused"] == refused
        users.set_mode(Mode.ON)
        assert await client.code(SEND, wrong) == WRONG

    in_world(file, scenario)


def test_a_new_key_of_the_issuer_is_read_for_the_first_token_with_it(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        assert (await client.code(SEND, session(token())))[0] == SENT
        new = session(token(key=p256_key(), kid="k2"))
        write_keys(file.parent, jwk(rsa_key()), jwk(p256_key(), "k2"))
        assert (await client.code(SEND, new))[0] == SENT
        assert await client.code(SEND, session(token(kid="k3"))) == WRONG

    in_world(file, scenario)


def test_a_removed_key_ends_its_tokens(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        own = session(token())
        assert (await client.code(SEND, own))[0] == SENT
        write_keys(file.parent, jwk(p256_key(), "k2"))
        assert (await client.code(SEND, session(token(key=p256_key(), kid="k2"))))[0] == SENT
        assert await client.code(SEND, own) == WRONG

    in_world(file, scenario)


def test_many_wrong_tokens_get_42900(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        own, forged = session(token()), session(token(key=rsa_key(1)))
        assert (await client.code(SEND, own))[0] == SENT
        for _ in range(CHECKS_MAX):
            assert await client.code(SEND, forged) == WRONG
        code, text = await client.code(SEND, forged)
        assert code == v2.TOO_MANY_REQUESTS
        assert "too many wrong Kubernetes tokens from" in text
        assert (await client.code(SEND, own))[0] == SENT
        assert (await client.code(SEND, signed("orders")))[0] == SENT

    in_world(file, scenario)


@pytest.mark.parametrize("method", ["receive_message", "telemetry"])
def test_the_end_of_a_token_ends_its_streams(file: Path, method: str) -> None:
    """A telemetry stream ends without an error: its client opens it with a newer token."""

    async def scenario() -> None:
        users = AccessWorld(issuer_keys=IssuerKeys(KeySource(str(file)), lambda: 0))
        users.put_user("orders", *entries([PUB]), accounts=["shop/orders"])
        revoked: list[object] = []
        users.gate.revoked.on_revoked = lambda client, _lost: revoked.append(client)
        users.now_ms = (NOW_S + 3_600 + LEEWAY_S) * 1_000 - 10
        call: Any = SimpleNamespace(
            method=method,
            metadata={**HEADERS, **session(token())},
            caller=None,
            client=ClientKey("c"),
            failure=None,
            watch=None,
            client_id="client-1",
            find_address=lambda: None,
            certificate_names=(),
        )
        users.gate.authenticate(call)
        began_ms, time_ms = users.now_ms, asyncio.get_running_loop().time
        began_s = time_ms()
        users.find_wall_ms = lambda: began_ms + round((time_ms() - began_s) * 1_000)

        async def endless() -> None:
            await asyncio.Event().wait()

        async with asyncio.timeout(5):
            if method == "telemetry":
                await users.gate.streams.watched(call, endless())
            else:
                with pytest.raises(TokenEnded, match="has ended"):
                    await users.gate.streams.watched(call, endless())
        assert not revoked

    asyncio.run(scenario())


def test_a_removed_key_ends_streams(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        call: Any = SimpleNamespace(
            method="receive_message",
            metadata={**HEADERS, **session(token())},
            caller=None,
            client=ClientKey("c"),
            failure=None,
            watch=None,
            client_id="client-1",
            find_address=lambda: None,
            certificate_names=(),
        )
        users.gate.authenticate(call)
        began = asyncio.Event()

        async def endless() -> None:
            began.set()
            await asyncio.Event().wait()

        stream = asyncio.create_task(users.gate.streams.watched(call, endless()))
        await began.wait()
        write_keys(file.parent, jwk(p256_key(), "k2"))
        assert users.gate.credentials.accounts is not None
        await users.gate.credentials.accounts.keys.read_for_unknown()
        async with asyncio.timeout(5):
            with pytest.raises(WrongCredentials):
                await stream

    in_world(file, scenario)


def test_forged_headers_of_identity_have_no_effect(file: Path) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        forged = {
            "x-mq-authorization-ak": "orders",
            "x-mq-channel-id": "c",
            "tidemill-user": "orders",
        }
        assert await client.code(SEND, forged) == (v2.UNAUTHORIZED, "no credentials")

    in_world(file, scenario)


def rpc_of(headers: dict[str, str], **fields: Any) -> Any:
    """Return a call as the transport sees it."""

    async def send(_message: bytes) -> None:
        pass

    async def hold_in_turn(_size: int, *, timeout_s: float) -> bool:
        return timeout_s > 0

    values: dict[str, Any] = {
        "metadata": {**HEADERS, **headers},
        "peer": lambda: "ipv4:10.1.2.3:4",
        "connection": 1,
        "time_remaining_s": None,
        "certificate_names": (),
        "send": send,
        "hold_in_turn": hold_in_turn,
        "release": lambda _size: None,
    }
    return SimpleNamespace(**{**values, **fields})


async def pages(_request: Any, _sharer: str) -> AsyncGenerator[bytes, None]:
    """Answer without an end, a page in each turn of the loop."""
    while True:
        yield b"page"
        await asyncio.sleep(0.001)


async def no_pages(_request: Any, _sharer: str) -> AsyncGenerator[bytes, None]:
    """Answer without a page."""
    none: tuple[bytes, ...] = ()
    for page in none:
        yield page


def pipeline_of(
    users: AccessWorld, answer: Any = no_pages, check: Any = lambda _call, _request: None
) -> Any:
    """Return a method of a pipeline behind the gate."""
    row = PipelineMethod(GetQueuesRequest, answer, check)
    [method] = pipeline_methods({"GetQueues": row}, ProxyMetrics(), users.gate).values()
    return method.handle


PIPELINE_GET = ("Cluster:pipeline", "Get")


def test_a_pipeline_call_reads_a_new_key_of_the_issuer(file: Path) -> None:
    """A new key of the issuer costs no call (ADR 0079)."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PIPELINE_GET]), accounts=["shop/orders"])
        write_keys(file.parent, jwk(rsa_key()), jwk(p256_key(), "k2"))
        await pipeline_of(users)(rpc_of(session(token(key=p256_key(), kid="k2"))), b"")

    in_world(file, scenario)


def test_a_pipeline_call_may_use_a_certificate(file: Path) -> None:
    """Each credential of a call counts on each service of the port (ADR 0081)."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("spark", *entries([PIPELINE_GET]), certificates=["spark"])
        for headers in ({}, signed("spark")):
            await pipeline_of(users)(rpc_of(headers, certificate_names=("spark",)), b"")

    in_world(file, scenario)


def test_a_pipeline_stream_ends_when_it_loses_the_last_of_many_rights(file: Path) -> None:
    """A request names up to 4,096 topics, and each of them counts until its end."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        topics = [f"orders-{number}" for number in range(limits.NAMES.limit)]
        granted = entries([("Topic:orders-*", "Get"), PIPELINE_GET])
        denied = parse_entry(f"Topic:{topics[-1]}", ["Get"], is_allowed=False)
        users.put_user("spark", *granted)
        request = GetQueuesRequest(topics=topics).SerializeToString()
        is_open = asyncio.Event()

        async def send(_page: bytes) -> None:
            is_open.set()

        method = pipeline_of(users, pages, pipeline_table._check_queues)
        stream = asyncio.create_task(method(rpc_of(signed("spark"), send=send), request))
        await is_open.wait()
        users.put_user("spark", *granted, denied, is_same=True)
        done, _ = await asyncio.wait([stream], timeout=5)
        stream.cancel()
        assert done, "the stream still reads a denied topic"
        with pytest.raises(RpcError, match=f"may not Get on Topic:{topics[-1]} "):
            await stream

    in_world(file, scenario)


@pytest.mark.parametrize("name", ["a bad name", ""])
def test_a_malformed_name_does_not_stop_the_checks_of_streams(file: Path, name: str) -> None:
    """A user without the right gets the error of the name, also while its stream is open."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        rights = entries([("Topic:*", "Get"), PIPELINE_GET])
        users.put_user("spark", *rights)
        method = pipeline_of(users, pages, pipeline_table._check_queues)
        is_open = [asyncio.Event(), asyncio.Event()]

        def begin(number: int, topic: str) -> asyncio.Task[None]:
            async def send(_page: bytes) -> None:
                is_open[number].set()

            request = GetQueuesRequest(topics=[topic]).SerializeToString()
            return asyncio.create_task(method(rpc_of(signed("spark"), send=send), request))

        streams = [begin(0, "orders"), begin(1, name)]
        for each in is_open:
            await each.wait()
        users.put_user("spark", *rights[1:], is_same=True)
        done, others = await asyncio.wait(streams, timeout=5)
        for stream in others:
            stream.cancel()
        assert len(done) == 2, "a stream goes on without the right"
        await asyncio.gather(*streams, return_exceptions=True)

    in_world(file, scenario)


def test_a_pipeline_stream_ends_when_its_user_is_disabled(file: Path) -> None:
    """Each open stream is checked after a change (section 7, propagation)."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("spark", *entries([PIPELINE_GET]))
        stream = asyncio.create_task(pipeline_of(users, pages)(rpc_of(signed("spark")), b""))
        await asyncio.sleep(0.05)
        assert not stream.done(), stream
        users.put_user("spark", is_same=True, is_enabled=False)
        done, _ = await asyncio.wait([stream], timeout=2)
        stream.cancel()
        assert done, "the disabled user still reads"

    in_world(file, scenario)


def test_the_mode_off_reads_no_keys_for_a_token(file: Path) -> None:
    """In the mode off, credentials are ignored, also if a client is banned (section 7)."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.set_mode(Mode.OFF)
        users.put_ban(BanKind.CLIENT, "another")
        call = Call(
            {**HEADERS, **session(token(kid="unknown"))},
            peer=lambda: "ipv4:10.1.2.3:4",
            connection=1,
            time_remaining_s=None,
            gate=users.gate,
        )
        assert not call.has_unknown_key()

    in_world(file, scenario)


def test_wrong_tokens_keep_no_stream_of_a_disabled_user(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of checks must not hide that the user of a known stream is disabled (S-11)."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        monkeypatch.setattr(kubernetes_tokens, "VERIFIED_MAX", 1)
        call = Call(
            {**HEADERS, **session(token())},
            peer=lambda: "ipv4:10.1.2.3:4",
            connection=1,
            time_remaining_s=None,
            gate=users.gate,
        )
        call.method = "telemetry"
        call.check()
        stream = asyncio.create_task(call.watched(asyncio.Event().wait()))  # type: ignore[arg-type]  # no result
        await client.code(SEND, session(token(claims_of(nbf=NOW_S - 1))))  # The first is forgotten.
        for _ in range(CHECKS_MAX):
            await client.code(SEND, session(token(key=rsa_key(1))))
        users.put_user("orders", is_same=True, accounts=["shop/orders"], is_enabled=False)
        done, _ = await asyncio.wait([stream], timeout=2)
        stream.cancel()
        assert done, "the stream of the disabled user is open"

    in_world(file, scenario)
