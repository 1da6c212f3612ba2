"""A request with very many errors is cheap, and its answer is short."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from pydantic import ValidationError

from tests.support.rest_identities import identities
from tidemill.admin.app import create_app
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.http.access import OTHER_BODY_BYTES_MAX, AccessControl, BodyLimit
from tidemill.admin.http.problems import REASON_CHARS_MAX, REASONS_MAX
from tidemill.admin.json.consumer_groups import CustomizedBackoffView
from tidemill.admin.json.messages import NewMessage
from tidemill.admin.json.schema import FIELDS_MAX, ITEMS_MAX, Schema
from tidemill.admin.routes.messages import MESSAGES, TOKENS_MAX, has_many_tokens
from tidemill.admin.scaling.demand_queries import DemandQueries

MANY = 100_000
SEND = "/api/v1/topics/orders/messages"


def asked(
    method: str, path: str, body: bytes, content_type: str = "application/json"
) -> httpx.Response:
    async def request() -> httpx.Response:
        # No request reaches a broker.
        app = create_app(object.__new__(Brokers), object.__new__(DemandQueries))
        door = AccessControl(
            app,
            identities=identities(),
            body_bytes_max=8 << 20,
            large={MESSAGES: BodyLimit(8 << 20)},
        )
        transport = httpx.ASGITransport(door)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"Content-Type": content_type} if content_type else {}
            return await client.request(method, path, content=body, headers=headers)

    return asyncio.run(request())


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (NewMessage, {"body": "", "properties": {str(n): 1 for n in range(MANY)}}),
        (NewMessage, {"body": "", "keys": [1] * MANY}),
        (NewMessage, {str(n): 1 for n in range(MANY)}),
        (CustomizedBackoffView, {"nextMs": ["x"] * MANY}),
    ],
    ids=["properties", "keys", "unknown fields", "waits"],
)
def test_too_many_items_are_one_error(schema: type[Schema], value: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(value)
    assert refused.value.error_count() == 1


def test_each_item_up_to_the_limit_is_checked() -> None:
    many = {str(n): "v" for n in range(ITEMS_MAX)}
    assert len(NewMessage.model_validate({"body": "", "properties": many}).properties) == ITEMS_MAX
    with pytest.raises(ValidationError) as refused:
        NewMessage.model_validate({str(n): 1 for n in range(FIELDS_MAX)})
    assert refused.value.error_count() == 1
    assert "unknown field '0'" in str(refused.value)


def test_an_answer_names_the_first_reasons() -> None:
    body = json.dumps({"keys": ["x"] * (REASONS_MAX + 1) + [1] * (REASONS_MAX + 1)}).encode()
    detail = asked("POST", SEND, body).json()["detail"]
    assert detail.count("keys.") == REASONS_MAX
    assert detail.endswith("and 1 more")
    assert len(detail) <= (REASONS_MAX + 1) * (REASON_CHARS_MAX + 2)


def test_a_large_body_with_many_small_tokens_is_not_parsed() -> None:
    many = b'{"body": "", "properties": {' + b",".join(b'"%x":1' % n for n in range(MANY)) + b"}}"
    assert has_many_tokens(many)
    answer = asked("POST", SEND, many)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("the body has more than 8192 strings and commas")
    assert has_many_tokens(b"," * (TOKENS_MAX + 1))
    assert not has_many_tokens(b"," * TOKENS_MAX)


def test_commas_and_quotes_within_a_string_do_not_count() -> None:
    text = ', "' * MANY + "\\"
    assert not has_many_tokens(json.dumps({"body": text, "tag": "a,b"}).encode())


def test_only_messages_may_be_large() -> None:
    body = json.dumps({"queues": 1, "x": "x" * OTHER_BODY_BYTES_MAX}).encode()
    assert asked("PUT", "/api/v1/topics/orders", body).status_code == 413
    assert asked("PUT", "/api/v1/topics/orders/messages/x", body).status_code == 413
    refused = asked("POST", SEND, body)
    assert refused.status_code == 400
    assert "unknown field 'queues'" in refused.json()["detail"]


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("body", [b"{}", b"no json"])
@pytest.mark.parametrize(
    "call",
    ["PUT /topics/orders", "POST /definitions:apply", "POST /definitions:convert?from=RABBITMQ"],
)
def test_a_body_of_another_type_is_not_read(call: str, body: bytes, content_type: str) -> None:
    """A form on a foreign web page can send it."""
    method, _, path = call.partition(" ")
    refused = asked(method, f"/api/v1{path}", body, content_type)
    assert refused.status_code == 415, refused.text
    assert f"Content-Type {content_type!r} is not JSON" in refused.json()["detail"]
