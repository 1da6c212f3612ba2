"""Named tokens at the port for clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.component.proxy.test_rights import PUB, SEND, Client, entries, in_world
from tests.support.worlds.access_world import AccessWorld
from tests.support.worlds.proxy_world import HEADERS
from tidemill.common.errors import Unauthorized
from tidemill.message.client_key import ClientKey
from tidemill.proxy.server import access
from tidemill.security.table import Mode
from tidemill.security.tokens import MadeToken, NamedToken, make_token
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

WRONG = (v2.UNAUTHORIZED, "the token is wrong")


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 0)
    monkeypatch.setattr(access, "WRONG_ANSWER_S", 0)


def put_token(
    users: AccessWorld, *roles: str, user_id: int = 1, not_after_ms: int = 0
) -> MadeToken:
    made = make_token()
    token = NamedToken(
        id=made.id,
        name="ci",
        user="orders",
        user_id=user_id,
        sha256=made.sha256,
        roles=roles,
        not_after_ms=not_after_ms,
    )
    users.put_item(token.to_item())
    return made


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_a_token_needs_no_signature_and_no_key_file() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        made = put_token(users)
        users.keys = None
        assert (await client.code(SEND, bearer(made.text)))[0] == v2.OK
        assert users.gate.credentials.authentications["token", "verified"] == 1
        limited = put_token(users, "viewer")
        code, text = await client.code(SEND, bearer(limited.text))
        assert (code, text.partition(" from ")[0]) == (
            v2.UNAUTHORIZED,
            "user orders may not Pub on Topic:topic",
        )

    in_world(scenario)


def test_unknown_wrong_and_malformed_tokens_get_one_answer() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        made = put_token(users)
        of_a_former_user = put_token(users, user_id=99)
        wrong = f"tmk_{made.id}_{make_token().text[-43:]}"
        for text in (make_token().text, wrong, "tmk_", "jwt.jwt.jwt", of_a_former_user.text):
            assert await client.code(SEND, bearer(text)) == WRONG
        assert users.gate.credentials.authentications["token", "refused"] == 5
        assert users.gate.credentials.authentications["signature", "refused"] == 0

    in_world(scenario)


def test_the_end_and_a_disabled_user_are_named_after_a_correct_token_alone() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        made = put_token(users, not_after_ms=users.now_ms)
        assert (await client.code(SEND, bearer(made.text)))[0] == v2.OK
        users.now_ms += 1
        ended = (v2.UNAUTHORIZED, "the token ci of user orders has ended")
        assert await client.code(SEND, bearer(made.text)) == ended
        wrong = f"tmk_{made.id}_{make_token().text[-43:]}"
        assert await client.code(SEND, bearer(wrong)) == WRONG
        users.put_user("orders", *entries([PUB]), is_enabled=False, is_same=True)
        made = put_token(users)
        disabled = (v2.UNAUTHORIZED, "user orders is disabled")
        assert await client.code(SEND, bearer(made.text)) == disabled
        users.set_mode(Mode.PERMISSIVE)
        assert (await client.code(SEND, bearer(made.text)))[0] == v2.OK

    in_world(scenario)


def test_the_deletion_of_a_token_ends_its_streams() -> None:
    """A stream is a task that is cancelled when its call has lost its rights."""

    async def scenario() -> None:
        users = AccessWorld()
        users.put_user("orders", *entries([PUB]))
        made = put_token(users)
        call: Any = SimpleNamespace(
            method="receive_message",
            metadata={**HEADERS, **bearer(made.text)},
            caller=None,
            client=ClientKey("c"),
            failure=None,
            watch=None,
            find_address=lambda: None,
            certificate_names=(),
        )

        async def stream() -> None:
            users.gate.authenticate(call)
            began.set()
            await asyncio.Event().wait()

        async def watched(answering: Awaitable[None]) -> str:
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    await users.gate.streams.watched(call, answering)
                except Unauthorized as error:
                    return error.message
            return ""

        began = asyncio.Event()
        task = asyncio.create_task(watched(stream()))
        await began.wait()
        del users.items["token", made.id]
        users.table.note_change("token", made.id)
        async with asyncio.timeout(5):
            assert await task == "the token is wrong"

    asyncio.run(scenario())


def test_the_end_of_a_token_ends_its_streams() -> None:
    """No item changes at the end of a token."""

    async def scenario() -> None:
        users = AccessWorld()
        users.put_user("orders", *entries([PUB]))
        made = put_token(users, not_after_ms=users.now_ms + 10)
        call: Any = SimpleNamespace(
            method="receive_message",
            metadata={**HEADERS, **bearer(made.text)},
            caller=None,
            client=ClientKey("c"),
            failure=None,
            watch=None,
            find_address=lambda: None,
            certificate_names=(),
        )
        users.gate.authenticate(call)
        checks = 0
        began_ms, time_ms = users.now_ms, asyncio.get_running_loop().time

        def wall_ms() -> int:
            nonlocal checks
            checks += 1
            return began_ms + round((time_ms() - began_s) * 1_000)

        async def endless() -> None:
            await asyncio.Event().wait()

        began_s = time_ms()
        users.find_wall_ms = wall_ms
        async with asyncio.timeout(5):
            with pytest.raises(Unauthorized, match="the token ci of user orders has ended"):
                await users.gate.streams.watched(call, endless())
        assert wall_ms() > began_ms + 10
        assert checks < 20, "a check at the end, not a loop"
        users.set_mode(Mode.PERMISSIVE)
        checks = 0
        await users.gate.streams.watched(call, asyncio.sleep(0.02))
        assert checks < 20

    asyncio.run(scenario())
