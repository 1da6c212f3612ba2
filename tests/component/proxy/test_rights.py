"""The rights of each method of the public service, one row each, and credentials."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple

import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from tests.support.plain_calls import answer_of
from tests.support.worlds.access_world import SECRET, AccessWorld, signed
from tests.support.worlds.proxy_world import (
    HEADERS,
    ProxyWorld,
    ResponseCollector,
    ack_request,
    message,
    receive_request,
    run,
)
from tidemill.common.errors import Unauthorized
from tidemill.message.resource_names import BROKER_DEAD_LETTER_TOPICS
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.metrics import request_code
from tidemill.proxy.server import access, credentials
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.methods import UNSERVED_UNARY
from tidemill.proxy.server.pipeline_source import check_pipeline_rights
from tidemill.proxy.server.pipeline_table import pipeline_table
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.security.acl import AccessEntry, parse_entry
from tidemill.security.secret_keys import new_key_line, parse_keys
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pipeline

TOPIC, GROUP = v2.Resource(name="topic"), v2.Resource(name="group")
QUEUE = v2.MessageQueue(topic=TOPIC, id=0, broker=v2.Broker(name="broker-0"))
PUB, SUB = ("Topic:topic", "Pub"), ("Topic:topic", "Sub")
GROUP_SUB, GET = ("Group:group", "Sub"), ("Topic:topic", "Get")


class Row(NamedTuple):
    """A request, and the rights that it needs: one of each group of alternatives."""

    method: str
    request: Message
    needs: Sequence[Sequence[tuple[str, str]]]


def settings(**fields: object) -> service.TelemetryCommand:
    values = v2.Settings(**fields)  # type: ignore[arg-type]  # by name
    return service.TelemetryCommand(settings=values)


ROWS = [
    Row("QueryRoute", service.QueryRouteRequest(topic=TOPIC), [[PUB, SUB]]),
    Row("SendMessage", service.SendMessageRequest(messages=[message()]), [[PUB]]),
    Row("RecallMessage", service.RecallMessageRequest(topic=TOPIC), [[PUB]]),
    Row("EndTransaction", service.EndTransactionRequest(topic=TOPIC), [[PUB]]),
    Row(
        "QueryAssignment",
        service.QueryAssignmentRequest(topic=TOPIC, group=GROUP),
        [[GROUP_SUB], [SUB]],
    ),
    Row("ReceiveMessage", receive_request(), [[GROUP_SUB], [SUB]]),
    Row("AckMessage", ack_request("handle"), [[GROUP_SUB], [SUB]]),
    Row(
        "ForwardMessageToDeadLetterQueue",
        service.ForwardMessageToDeadLetterQueueRequest(topic=TOPIC, group=GROUP),
        [[GROUP_SUB], [SUB]],
    ),
    Row(
        "ChangeInvisibleDuration",
        service.ChangeInvisibleDurationRequest(topic=TOPIC, group=GROUP),
        [[GROUP_SUB], [SUB]],
    ),
    Row("Heartbeat", service.HeartbeatRequest(client_type=v2.PRODUCER), []),
    Row(
        "Heartbeat",
        service.HeartbeatRequest(client_type=v2.PUSH_CONSUMER, group=GROUP),
        [[GROUP_SUB]],
    ),
    Row("NotifyClientTermination", service.NotifyClientTerminationRequest(), []),
    Row(
        "NotifyClientTermination",
        service.NotifyClientTerminationRequest(group=GROUP),
        [[GROUP_SUB]],
    ),
    Row(
        "PullMessage",
        service.PullMessageRequest(group=GROUP, message_queue=QUEUE),
        [[GROUP_SUB], [SUB]],
    ),
    Row(
        "GetOffset",
        service.GetOffsetRequest(group=GROUP, message_queue=QUEUE),
        [[GROUP_SUB], [SUB]],
    ),
    Row(
        "UpdateOffset",
        service.UpdateOffsetRequest(group=GROUP, message_queue=QUEUE),
        [[GROUP_SUB], [SUB]],
    ),
    Row("QueryOffset", service.QueryOffsetRequest(message_queue=QUEUE), [[SUB, GET]]),
    Row(
        "Telemetry",
        settings(client_type=v2.PRODUCER, publishing=v2.Publishing(topics=[TOPIC])),
        [[PUB]],
    ),
    Row(
        "Telemetry",
        settings(
            client_type=v2.PUSH_CONSUMER,
            subscription=v2.Subscription(
                group=GROUP, subscriptions=[v2.SubscriptionEntry(topic=TOPIC)]
            ),
        ),
        [[GROUP_SUB], [SUB]],
    ),
]


class Client:
    """Calls of one user through the gate; without users, there is none."""

    def __init__(self, world: ProxyWorld, users: AccessWorld | None) -> None:
        self._world = world
        self._users = users

    async def code(
        self, row: Row, headers: dict[str, str], language: str = "JAVA"
    ) -> tuple[int, str]:
        """Return the code and the text of the first answer."""
        name = row.method
        call = Call(
            {**HEADERS, "x-mq-language": language, **headers},
            peer=lambda: "ipv4:10.1.2.3:5000",
            connection="test",
            time_remaining_s=5,
            gate=None if self._users is None else self._users.gate,
        )
        encoded, methods = row.request.SerializeToString(), self._world.methods
        boundary, label = self._world.boundary, request_code(name)
        if name in methods.unary or name in methods.plain:
            answer = await answer_of(boundary, methods, name, call, encoded, label)
            # The status is the first field of every response, and the only one of this type.
            status = service.NotifyClientTerminationResponse.FromString(answer).status
        elif name in methods.streaming:
            responses = ResponseCollector()
            await boundary.streaming(label, methods.streaming[name], call, encoded, responses)
            status = responses.items[0].status
        else:
            collected = _Telemetry()
            await boundary.bidirectional(
                label, methods.bidirectional[name], call, _once(encoded), collected
            )
            status = collected.commands[0].status
        return status.code, status.message


class _Telemetry(ResponseCollector):
    def __init__(self) -> None:
        super().__init__()
        self.commands: list[service.TelemetryCommand] = []

    async def send(self, message: bytes) -> None:
        self.commands.append(service.TelemetryCommand.FromString(message))


async def _once(request: bytes) -> AsyncIterator[bytes]:
    yield request


def entries(rights: Sequence[tuple[str, str]]) -> list[AccessEntry]:
    return [parse_entry(resource, [action]) for resource, action in rights]


def in_world(scenario: Callable[[AccessWorld, Client], Awaitable[None]]) -> None:
    async def with_topic(world: ProxyWorld) -> None:
        await world.put_topic()
        await world.put_group()
        users = AccessWorld()
        await scenario(users, Client(world, users))

    run(with_topic)


@pytest.fixture(autouse=True)
def _short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 0)


def test_each_method_has_a_row() -> None:
    async def scenario(world: ProxyWorld) -> None:
        methods = world.methods
        served = {*methods.unary, *methods.plain, *methods.streaming, *methods.bidirectional}
        assert {row.method for row in ROWS} == served - set(UNSERVED_UNARY)

    run(scenario)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.method)
def test_a_call_is_allowed_with_exactly_its_rights(row: Row) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        chosen = [group[0] for group in row.needs]
        other = ("Topic:other", "All")
        users.put_user("enough", *entries([*chosen, other]))
        code, text = await client.code(row, signed("enough"))
        assert code != v2.UNAUTHORIZED, text
        for group in row.needs:
            for alternative in group[1:]:
                users.put_user("other", *entries([alternative]))
                assert (await client.code(row, signed("other")))[0] != v2.UNAUTHORIZED
        for missing in range(len(chosen)):
            left = chosen[:missing] + chosen[missing + 1 :]
            users.put_user("less", *entries([*left, other]))
            code, text = await client.code(row, signed("less"))
            assert code == v2.UNAUTHORIZED
            resource = chosen[missing][0]
            assert text.startswith("user less may not ")
            assert text.endswith(f"on {resource} from 10.1.2.3")

    in_world(scenario)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.method)
def test_a_call_without_credentials_is_refused(row: Row) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        assert await client.code(row, {}) == (v2.UNAUTHORIZED, "no credentials")
        users.set_mode(Mode.PERMISSIVE)
        assert (await client.code(row, {}))[0] != v2.UNAUTHORIZED
        assert users.gate.accesses[request_code(row.method), "would_refuse"] >= 1
        users.set_mode(Mode.OFF)
        before = sum(users.gate.accesses.values())
        assert (await client.code(row, {}))[0] != v2.UNAUTHORIZED
        assert sum(users.gate.accesses.values()) == before

    in_world(scenario)


SEND = ROWS[1]
WRONG = (v2.UNAUTHORIZED, "the access key or the signature is wrong")


def test_an_unknown_user_and_a_wrong_signature_get_one_answer() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        assert await client.code(SEND, signed("nobody")) == WRONG
        assert await client.code(SEND, signed("orders", "another secret ...")) == WRONG
        changed = {**signed("orders"), "x-mq-date-time": "20261129T140553Z"}
        assert await client.code(SEND, changed) == WRONG
        assert (await client.code(SEND, signed("orders")))[0] == v2.OK

    in_world(scenario)


def test_what_a_user_may_not_do_is_named_after_a_correct_signature_alone() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]), is_enabled=False)
        disabled = (v2.UNAUTHORIZED, "user orders is disabled")
        assert await client.code(SEND, signed("orders")) == disabled
        assert await client.code(SEND, signed("orders", "another secret ...")) == WRONG
        users.put_user("orders", *entries([PUB]), not_after_ms=users.now_ms - 1)
        code, text = await client.code(SEND, signed("orders"))
        assert (code, "has ended" in text) == (v2.UNAUTHORIZED, True)

    in_world(scenario)


def test_a_refused_user_stays_refused_when_it_repeats_a_header() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("disabled", *entries([PUB]), is_enabled=False)
        users.put_user("over", *entries([PUB]), not_after_ms=users.now_ms - 1)
        for name in ("disabled", "over"):
            for _ in range(3):
                assert (await client.code(SEND, signed(name)))[0] == v2.UNAUTHORIZED

    in_world(scenario)


def test_verified_headers_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "VERIFIED_MAX", 3)

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        dates = [f"20261129T14055{digit}Z" for digit in range(5)]
        for date in (*dates, *dates, dates[-1]):
            assert (await client.code(SEND, signed("orders", date=date)))[0] == v2.OK
        remembered = users.gate.credentials._verified
        assert [date for _, date in remembered] == dates[-3:]
        users.put_user("orders", *entries([PUB]), is_same=True)
        for date in dates:
            assert (await client.code(SEND, signed("orders", date=date)))[0] == v2.OK
        assert [date for _, date in remembered] == dates[-3:]

    in_world(scenario)


def test_a_verified_header_is_no_right() -> None:
    """The same header is sent again after each change."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        headers = signed("orders")

        async def code() -> int:
            return (await client.code(SEND, headers))[0]

        users.put_user("orders", *entries([PUB]))
        assert await code() == v2.OK
        users.put_item({**_user_item(users, "orders", entries=[])})
        assert await code() == v2.UNAUTHORIZED
        users.put_user("orders", *entries([PUB]), secrets=("a new secret of it",))
        assert await code() == v2.UNAUTHORIZED, "another user of this name"
        users.put_user("orders", *entries([PUB]))
        assert await code() == v2.OK
        users.put_user("orders", *entries([PUB]), secrets=("a newer one of it",), is_same=True)
        assert await code() == v2.UNAUTHORIZED, "another secret with the same id"
        users.put_user("orders", *entries([PUB]), is_same=True)
        assert await code() == v2.OK
        users.delete_user("orders")
        assert await code() == v2.UNAUTHORIZED

    in_world(scenario)


def _user_item(users: AccessWorld, name: str, **changes: object) -> dict[str, object]:
    item = json.loads(users.items["user", name])
    return {**item, "user": {**item["user"], **changes}}


def test_a_secret_counts_until_its_end() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]), not_after_ms=users.now_ms + 10)
        assert (await client.code(SEND, signed("orders")))[0] == v2.OK
        users.now_ms += 11
        assert (await client.code(SEND, signed("orders")))[0] == v2.UNAUTHORIZED

    in_world(scenario)


def test_both_secrets_of_a_user_are_valid() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]), secrets=("the older secret 1", SECRET))
        assert (await client.code(SEND, signed("orders", "the older secret 1")))[0] == v2.OK
        assert (await client.code(SEND, signed("orders")))[0] == v2.OK

    in_world(scenario)


def test_a_malformed_name_is_reported_before_a_missing_right() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders")
        row = Row("QueryRoute", service.QueryRouteRequest(topic=v2.Resource(name="a b")), [])
        assert (await client.code(row, signed("orders")))[0] == v2.ILLEGAL_TOPIC

    in_world(scenario)


def test_an_existing_and_a_missing_name_look_alike_without_rights() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([GROUP_SUB]))
        rows = [Row("ReceiveMessage", receive_request(name), []) for name in ("topic", "missing")]
        found = [await client.code(row, signed("orders")) for row in rows]
        assert [code for code, _ in found] == [v2.UNAUTHORIZED] * 2
        assert found[0][1].replace("Topic:topic", "Topic:missing") == found[1][1]

    in_world(scenario)


def test_the_first_use_of_a_name_creates_it_with_the_right_to_create_alone() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        row = Row("SendMessage", service.SendMessageRequest(messages=[message(topic="new")]), [])
        users.put_user("orders", *entries([("Topic:new", "Pub")]))
        assert (await client.code(row, signed("orders")))[0] == v2.TOPIC_NOT_FOUND
        users.put_user("orders", *entries([("Topic:new", "Pub"), ("Topic:new", "Create")]))
        assert (await client.code(row, signed("orders")))[0] == v2.OK

    in_world(scenario)


def test_a_first_send_counts_the_missing_right_to_create_once() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([("Topic:*", "Pub")]))
        users.set_mode(Mode.PERMISSIVE)
        for number in (1, 2):
            first = message(topic=f"new-{number}")
            row = Row("SendMessage", service.SendMessageRequest(messages=[first]), [])
            for _ in range(2):
                assert (await client.code(row, signed("orders")))[0] == v2.OK
            assert users.gate.accesses["send_message", "would_refuse"] == number

    in_world(scenario)


def test_without_the_key_file_signed_calls_are_refused_as_unavailable() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        users.keys = None
        assert (await client.code(SEND, signed("orders")))[0] == v2.INTERNAL_SERVER_ERROR
        users.set_mode(Mode.PERMISSIVE)
        assert (await client.code(SEND, signed("orders")))[0] == v2.OK

    in_world(scenario)


def test_a_secret_of_another_key_file_is_logged_once() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        users.keys = parse_keys(new_key_line("k2"))
        with capture_logs() as lines:
            for _ in range(2):
                code = (await client.code(SEND, signed("orders")))[0]
                assert code == v2.INTERNAL_SERVER_ERROR
        [line] = [each for each in lines if each["event"] == "secret not decrypted"]
        assert line["user"] == "orders"

    in_world(scenario)


def test_wrong_credentials_are_answered_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check of an existing user takes longer than that of an unknown one."""
    monkeypatch.setattr(access, "WRONG_ANSWER_S", 3_600)

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        for name in ("orders", "nobody"):
            task = asyncio.ensure_future(client.code(SEND, signed(name, "another secret ...")))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not task.done()
            task.cancel()
        assert (await client.code(SEND, {}))[0] == v2.UNAUTHORIZED

    in_world(scenario)


def test_a_refusal_is_delayed_for_clients_that_repeat_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 3_600)

    async def scenario(users: AccessWorld, client: Client) -> None:
        telemetry, receive = ROWS[-1], ROWS[5]
        for row, language in ((telemetry, "CPP"), (receive, "GO")):
            task = asyncio.ensure_future(client.code(row, {}, language))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not task.done()
            task.cancel()
        assert (await client.code(receive, {}, "JAVA"))[0] == v2.UNAUTHORIZED
        monkeypatch.setattr(access, "DELAYED_MAX", 0)
        assert (await client.code(receive, {}, "GO"))[0] == v2.UNAUTHORIZED, "too many wait"

    in_world(scenario)


PIPELINE_GET = ("Cluster:pipeline", "Get")
ALL_TOPICS, ALL_GROUPS, GROUP_GET = ("Topic:*", "Get"), ("Group:*", "Get"), ("Group:group", "Get")
PIPELINE_ROWS: list[tuple[str, Message, list[tuple[str, str]]]] = [
    ("ReadEvents", pipeline.ReadEventsRequest(), [ALL_TOPICS, ALL_GROUPS]),
    ("ReadEvents", pipeline.ReadEventsRequest(topics=["topic"]), [GET]),
    ("GetQueues", pipeline.GetQueuesRequest(), []),
    ("GetQueues", pipeline.GetQueuesRequest(topics=["topic"], with_groups=True), [GET, ALL_GROUPS]),
    ("GetQueues", pipeline.GetQueuesRequest(topic_pattern="to*"), [ALL_TOPICS, ALL_GROUPS]),
    ("ReadMessages", pipeline.ReadMessagesRequest(topic="topic"), [GET, SUB]),
    (
        "ReadMessages",
        pipeline.ReadMessagesRequest(topic="topic", quota_group="group"),
        [GET, SUB, GROUP_SUB],
    ),
    ("ListPending", pipeline.ListPendingRequest(), [ALL_TOPICS, ALL_GROUPS]),
    ("ListPending", pipeline.ListPendingRequest(topics=["topic"]), [GET]),
    ("ListInFlight", pipeline.ListInFlightRequest(), [ALL_GROUPS]),
    ("ListInFlight", pipeline.ListInFlightRequest(groups=["group"]), [GROUP_GET]),
    ("ListProgress", pipeline.ListProgressRequest(), [ALL_GROUPS]),
    ("ListProgress", pipeline.ListProgressRequest(groups=["group"]), [GROUP_GET]),
]


@pytest.mark.parametrize(("method", "request_", "needs"), PIPELINE_ROWS)
def test_a_pipeline_call_is_allowed_with_exactly_its_rights(
    method: str, request_: Message, needs: list[tuple[str, str]]
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        users = AccessWorld()
        calls = BrokerCalls()
        rows = pipeline_table(world.cluster, calls, PullPages(calls))
        assert {row[0] for row in PIPELINE_ROWS} == rows.keys()

        def check() -> None:
            call = Call(
                signed("spark"),
                peer=lambda: "ipv4:10.1.2.3:5000",
                connection="test",
                time_remaining_s=5,
                gate=users.gate,
            )
            check_pipeline_rights(call, rows[method], request_)

        chosen = [PIPELINE_GET, *needs]
        users.put_user("spark", *entries(chosen))
        check()
        for missing in range(len(chosen)):
            users.put_user("spark", *entries(chosen[:missing] + chosen[missing + 1 :]))
            with pytest.raises(Unauthorized, match="user spark may not"):
                check()
        if ALL_TOPICS in needs:
            denied = parse_entry("Topic:secret", ["Get"], is_allowed=False)
            users.put_user("spark", *entries(chosen), denied)
            with pytest.raises(Unauthorized):
                check()

    run(scenario)


@pytest.mark.parametrize("topic", sorted(BROKER_DEAD_LETTER_TOPICS))
def test_the_dead_letters_of_the_broker_need_the_right_on_all_topics(topic: str) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        row = Row("ReceiveMessage", receive_request(topic), [])
        users.put_user("one", *entries([GROUP_SUB, ("Topic:order*", "Sub")]))
        assert (await client.code(row, signed("one")))[0] == v2.UNAUTHORIZED
        users.put_user("all", *entries([GROUP_SUB, ("Topic:*", "Sub")]))
        assert (await client.code(row, signed("all")))[0] != v2.UNAUTHORIZED

    in_world(scenario)


def test_the_mode_permissive_passes_malformed_names_on() -> None:
    """A heartbeat of a consumer without a group is valid."""

    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders")
        row = Row("Heartbeat", service.HeartbeatRequest(client_type=v2.PUSH_CONSUMER), [])
        users.set_mode(Mode.OFF)
        expected = (await client.code(row, signed("orders")))[0]
        users.set_mode(Mode.PERMISSIVE)
        assert (await client.code(row, signed("orders")))[0] == expected

    in_world(scenario)
