"""Operators' requests to clients, and their answers, through the broker's relay and a proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.support.clocks import ManualClock
from tests.support.worlds.engine_world import blob
from tests.support.worlds.proxy_world import eventually
from tidemill.broker.server.admin import relay as broker_relay
from tidemill.broker.server.admin.relay import Relay
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.broker.server.transactions.producers import Producers
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients.clients import EXPIRY_MS, Client, Clients
from tidemill.proxy.clients.questions import CLIENTS_MAX, Questions
from tidemill.proxy.clients.relay import Relays
from tidemill.proxy.clients.telemetry_streams import ClientAnswer
from tidemill.proxy.settings import ProxySettings
from tidemill.security.access_log import AccessLog
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.aio.process_service import ProcessService
from tidemill.transport.aio.tls import Certificates
from tidemill.transport.grpc.status import RpcCode, RpcError

LONG_MS = 10_000
CLIENT = ClientKey("c")
ALL = pb.ProxyQuestion(list_clients=pb.ListClientsRequest())


class Stream:
    """A call of Attach: the proxy's end writes, the broker's iterates."""

    part_heard_at_s = 0.0  # messages arrive whole

    def __init__(self, relay: Relay, on_message: Callable[[bytes], None]) -> None:
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._broker_end = BrokerEnd(self._answers, on_message)
        self._serving = asyncio.create_task(relay.attach(self._broker_end))

    def write(self, message: bytes) -> None:
        self._answers.put_nowait(message)

    def write_last(self, message: bytes) -> None:
        self.write(message)

    def cancel(self) -> None:
        self._answers.put_nowait(None)

    def fail(self, error: RpcError) -> None:
        raise error

    async def wait_ended(self) -> None:
        await asyncio.shield(self._serving)


class BrokerEnd:
    """The broker's end of the call."""

    unsent_bytes = 0

    def __init__(
        self, answers: asyncio.Queue[bytes | None], on_message: Callable[[bytes], None]
    ) -> None:
        self._answers = answers
        self.write = on_message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (answer := await self._answers.get()) is not None:
            yield answer


class World:
    """A broker's relay, and a proxy with its clients."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.relay = Relay(Producers())
        self.clients = Clients(clients_max=10_000, monotonic_ms=self.clock.monotonic_ms)
        self.addresses = ["broker:1"]
        self.is_there = True
        self.streams: list[Stream] = []
        self.access_log = AccessLog("proxy-7", self.clock.wall_ms, self.clock.monotonic_ms)
        self.kicked: list[pb.KickClient] = []
        self.user_id = 0
        self.security = pb.SecurityState(version=7, mode="on", key_ids=["k2", "k1"])
        questions = Questions(
            self.clients,
            self.clock.monotonic_ms,
            self.access_log,
            self.kick,
            self.state_of,
            ProcessService(
                "proxy",
                "proxy-7",
                ProxySettings(),
                self.clock.wall_ms,
                is_ready=lambda: True,
                certificates=Certificates([]),
            ),
        )
        self.relays = Relays(
            "proxy-7",
            lambda: self.addresses,
            questions.answer,
            publishers=self.clients.publishers,
            connect=self.connect,
        )

    def state_of(self, asked: pb.GetSecurityState) -> pb.SecurityState:
        self.user_id = asked.user_id
        return self.security

    def kick(self, asked: pb.KickClient) -> pb.KickedClient:
        self.kicked.append(asked)
        return pb.KickedClient(is_known=True, polls=2, streams=1)

    @contextlib.asynccontextmanager
    async def connect(self, _address: str, *_: object, **__: object) -> AsyncIterator[World]:
        if not self.is_there:
            raise RpcError(RpcCode.UNAVAILABLE, "nobody is there")
        yield self

    heard_at_s = 0.0

    def open(self, _path: str, on_message: Callable[[bytes], None]) -> Stream:
        stream = Stream(self.relay, on_message)
        self.streams.append(stream)
        return stream

    def seen(
        self,
        client_id: str,
        *,
        group: str = "",
        client_type: int = v2.PUSH_CONSUMER,
        topics: Sequence[str] | None = None,
    ) -> None:
        settings = None
        if topics is not None:
            entries = [v2.SubscriptionEntry(topic=v2.Resource(name=topic)) for topic in topics]
            subscription = v2.Subscription(subscriptions=entries)
            settings = v2.Settings(subscription=subscription).SerializeToString()
        client = Client(
            client_type=client_type,
            group=group,
            language="JAVA",
            version="5",
            seen_at_ms=self.clock.monotonic_ms(),
            address="ipv4:10.1.2.3:4",
        )
        self.clients.record(ClientKey(client_id), client, settings, connection=client_id)

    async def proxy(self) -> pb.ProxyName:
        """Wait until the proxy is attached, and return it."""
        await eventually(lambda: len(self.relay._attached) == 1)
        [name] = (await self.relay.ListProxies(pb.ListProxiesRequest())).proxies
        return name

    async def ask(self, question: pb.ProxyQuestion, *, timeout_ms: int = LONG_MS) -> pb.ProxyAnswer:
        """Ask the proxy as the admin process does."""
        name = await self.proxy()
        request = pb.AskProxyRequest(
            process_id=name.process_id, question=question, timeout_ms=timeout_ms
        )
        return await self.relay.AskProxy(request)

    async def command(self, client_id: str, **command: Any) -> pb.ProxyAnswer:
        """Record a sign of life of a client."""
        asked = pb.ClientCommand(client_id=client_id, timeout_ms=LONG_MS, **command)
        return await self.ask(pb.ProxyQuestion(command=asked))


class ClientStream:
    """The telemetry stream of a client that answers each command."""

    def __init__(self, world: World, client_id: str, answer: ClientAnswer | None) -> None:
        self.commands: list[service.TelemetryCommand] = []
        self._world = world
        self._client_id = client_id
        self._answer = answer
        self.connection: Hashable = self

    def drain_connection(self) -> None:
        pass

    def hold(self, _size_bytes: int) -> bool:
        return True

    def release(self, _size_bytes: int) -> None:
        pass

    async def send(self, message: bytes) -> None:
        command = service.TelemetryCommand.FromString(message)
        self.commands.append(command)
        if self._answer is not None:
            field = command.WhichOneof("command")
            assert field is not None
            nonce = getattr(command, field).nonce
            self._world.clients.streams.resolve(ClientKey(self._client_id), nonce, self._answer)


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        async with asyncio.timeout(20), world.relays.running():
            await scenario(world)

    asyncio.run(main())


def refused_as(error: RpcError) -> str:
    return dict(error.trailers)[ERROR_KEY]


def test_a_kick_is_asked_through_the_broker() -> None:
    async def scenario(world: World) -> None:
        asked = pb.KickClient(client_id="c", user="orders", requested_by="ops")
        answer = await world.ask(pb.ProxyQuestion(kick=asked))
        assert (answer.kicked.polls, answer.kicked.streams) == (2, 1)
        assert world.kicked == [asked]

    run(scenario)


def test_the_security_state_is_asked_through_the_broker() -> None:
    async def scenario(world: World) -> None:
        asked = pb.GetSecurityState(user_id=7)
        answer = await world.ask(pb.ProxyQuestion(get_security=asked))
        assert answer.security == world.security
        assert world.user_id == 7

    run(scenario)


def test_a_list_is_asked_through_the_broker() -> None:
    async def scenario(world: World) -> None:
        for n in range(5):
            world.seen(f"c{n}", group="g")
        world.clock.advance(1_000)
        answer = await world.ask(ALL)
        assert [state.client_id for state in answer.clients.clients] == [f"c{n}" for n in range(5)]
        state = answer.clients.clients[0]
        assert (state.address, state.silent_ms, state.has_stream) == ("10.1.2.3:4", 1_000, False)
        assert (await world.proxy()).name == "proxy-7"

    run(scenario)


def test_a_page_is_limited_for_any_request() -> None:
    async def scenario(world: World) -> None:
        for n in range(CLIENTS_MAX + 1):
            world.seen(f"c{n:05}")
        asked = pb.ListClientsRequest(clients_max=1_000_000)
        answer = await world.ask(pb.ProxyQuestion(list_clients=asked))
        assert len(answer.clients.clients) == CLIENTS_MAX
        assert answer.clients.has_more

    run(scenario)


def test_a_command_gets_to_the_client_and_its_answer_back() -> None:
    async def scenario(world: World) -> None:
        world.seen("c")
        stream = ClientStream(world, "c", ClientAnswer(v2.OK, "", "all threads"))
        with world.clients.streams.open(CLIENT, stream), capture_logs() as logs:
            answer = await world.command(
                "c", print_stack=pb.PrintStack(), requested_by="me at 10.0.0.1"
            )
        [line] = [one for one in logs if one["event"] == "client asked"]
        assert (line["client"], line["command"], line["by"]) == (
            "c",
            "print_stack",
            "me at 10.0.0.1",
        )
        assert (answer.client.code, answer.client.stack, answer.error) == (v2.OK, "all threads", "")

    run(scenario)


def test_a_message_to_verify_is_as_at_a_delivery() -> None:
    async def scenario(world: World) -> None:
        world.seen("c", topics=["orders"])
        stream = ClientStream(world, "c", ClientAnswer(v2.FAILED_TO_CONSUME_MESSAGE, "why", ""))
        found = pb.FoundMessage(
            queue_id=3, queue_offset=4, stored_at_ms=5_000, delivery_attempt=2, blob=stored()
        )
        with world.clients.streams.open(CLIENT, stream):
            answer = await world.command(
                "c", verify=pb.VerifiedMessage(topic="orders", message=found)
            )
        assert (answer.client.code, answer.client.message) == (v2.FAILED_TO_CONSUME_MESSAGE, "why")
        message = stream.commands[0].verify_message_command.message
        system = message.system_properties
        assert (message.topic.name, message.body, system.message_id) == ("orders", b"body", "ID")
        assert (system.queue_id, system.queue_offset, system.delivery_attempt) == (3, 4, 2)
        assert system.store_timestamp.seconds == 5
        assert not system.receipt_handle

    run(scenario)


def stored() -> bytes:
    """Return a stored message with valid protobuf parts."""
    from tidemill.message.encoding import encode_stored

    message = v2.Message(
        topic=v2.Resource(name="orders"),
        system_properties=v2.SystemProperties(message_id="ID", body_encoding=v2.IDENTITY),
        body=b"body",
    )
    return encode_stored(message, message_type=v2.NORMAL, now_ms=1)


@pytest.mark.parametrize("bad", [b"", blob("text")])
def test_an_undecodable_message_is_rejected(bad: bytes) -> None:
    async def scenario(world: World) -> None:
        world.seen("c", topics=["orders"])
        verify = pb.VerifiedMessage(topic="orders", message=pb.FoundMessage(blob=bad))
        answer = await world.command("c", verify=verify)
        assert answer.error == "BadRequest"

    run(scenario)


def test_a_message_to_verify_goes_only_to_its_consumers() -> None:
    async def scenario(world: World) -> None:
        world.seen("producer", client_type=v2.PRODUCER)
        world.seen("other", topics=["a", "b"])
        world.seen("unknown")
        answered = ClientAnswer(v2.OK, "", "")
        names = "producer", "other", "unknown"
        streams = {name: ClientStream(world, name, answered) for name in names}

        async def rpc_error(name: str, *, is_forced: bool = False) -> tuple[str, str]:
            found = pb.FoundMessage(blob=stored())
            verify = pb.VerifiedMessage(topic="orders", message=found, is_forced=is_forced)
            with world.clients.streams.open(ClientKey(name), streams[name]):
                answer = await world.command(name, verify=verify)
            return answer.error, answer.message

        for is_forced in False, True:
            error, message = await rpc_error("producer", is_forced=is_forced)
            assert (error, "not a push consumer" in message) == ("ClientCannot", True)
            error, message = await rpc_error("other", is_forced=is_forced)
            assert (error, "subscribes to a, b, not to orders" in message) == ("BadRequest", True)
        error, message = await rpc_error("unknown")
        assert (error, "force" in message) == ("BadRequest", True)
        assert not any(stream.commands for stream in streams.values())
        assert await rpc_error("unknown", is_forced=True) == ("", "")
        assert streams["unknown"].commands

    run(scenario)


def test_an_answer_with_an_unknown_code_comes_back() -> None:
    async def scenario(world: World) -> None:
        world.seen("c")
        code = cast("v2.Code.ValueType", -1)
        stream = ClientStream(world, "c", ClientAnswer(code, "", ""))
        with world.clients.streams.open(CLIENT, stream):
            answer = await world.command("c", print_stack=pb.PrintStack())
        assert (answer.error, answer.client.code) == ("", -1)

    run(scenario)


def test_commands_that_wait_leave_room_for_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_relay, "COMMANDS_MAX", 1)

    async def scenario(world: World) -> None:
        world.seen("c")
        with world.clients.streams.open(CLIENT, ClientStream(world, "c", None)):
            first = asyncio.create_task(world.command("c", print_stack=pb.PrintStack()))
            await eventually(lambda: world.clients.streams.is_asked(CLIENT))
            with pytest.raises(RpcError) as many:
                await world.command("c", print_stack=pb.PrintStack())
            assert refused_as(many.value) == "Overloaded"
            assert (await world.ask(ALL)).clients.clients
            first.cancel()
            await asyncio.wait([first])
        with world.clients.streams.open(
            CLIENT, ClientStream(world, "c", ClientAnswer(v2.OK, "", "again"))
        ):
            answer = await world.command("c", print_stack=pb.PrintStack())
            assert answer.client.stack == "again"

    run(scenario)


def test_missing_mute_and_silent_clients_have_different_errors() -> None:
    async def scenario(world: World) -> None:
        assert (await world.command("c", print_stack=pb.PrintStack())).error == "ClientNotFound"
        world.seen("c")
        assert (await world.command("c", print_stack=pb.PrintStack())).error == "ClientMute"
        with world.clients.streams.open(CLIENT, ClientStream(world, "c", None)):
            asked = pb.ClientCommand(client_id="c", timeout_ms=1, print_stack=pb.PrintStack())
            answer = await world.ask(pb.ProxyQuestion(command=asked))
        assert answer.error == "ClientTimeout"
        world.clock.advance(EXPIRY_MS + 1)
        assert (await world.command("c", print_stack=pb.PrintStack())).error == "ClientNotFound"

    run(scenario)


def test_a_newer_question_is_rejected_at_once() -> None:
    async def scenario(world: World) -> None:
        world.seen("c")
        assert (await world.ask(pb.ProxyQuestion())).error == "BadRequest"
        assert (await world.command("c")).error == "BadRequest"

    run(scenario)


def test_a_failed_question_is_answered_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        world.seen("c")
        # An unexpected error.
        monkeypatch.setattr(world.clients, "find", lambda _client_id: 1 // 0)
        answer = await world.command("c", print_stack=pb.PrintStack())
        assert answer.error == "ProxyUnreachable"
        assert "ZeroDivisionError" in answer.message

    with capture_logs() as logs:
        run(scenario)
    [failed] = [one for one in logs if one["event"] == "question failed unexpectedly"]
    assert failed["exc_info"], "the log line has the traceback"


def test_a_disconnect_of_the_proxy_ends_its_questions() -> None:
    async def scenario(world: World) -> None:
        world.seen("c")
        with world.clients.streams.open(CLIENT, ClientStream(world, "c", None)):
            name = await world.proxy()
            asking = asyncio.create_task(world.command("c", print_stack=pb.PrintStack()))
            await eventually(lambda: world.clients.streams.is_asked(CLIENT))
            world.is_there = False
            world.streams[0].cancel()
            with pytest.raises(RpcError) as gone:
                await asking
        assert refused_as(gone.value) == "ProxyUnreachable"
        assert gone.value.message == "proxy proxy-7 has disconnected; try again"
        request = pb.AskProxyRequest(process_id=name.process_id, question=ALL, timeout_ms=LONG_MS)
        with pytest.raises(RpcError) as unknown:
            await world.relay.AskProxy(request)
        assert refused_as(unknown.value) == "ProxyNotFound"
        assert not (await world.relay.ListProxies(pb.ListProxiesRequest())).proxies

    run(scenario)


def test_a_slow_proxy_and_too_many_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_relay, "QUESTIONS_MAX", 1)

    async def scenario(world: World) -> None:
        world.seen("c")
        silent = pb.ClientCommand(client_id="c", timeout_ms=LONG_MS, print_stack=pb.PrintStack())
        question = pb.ProxyQuestion(command=silent)
        with world.clients.streams.open(CLIENT, ClientStream(world, "c", None)):
            first = asyncio.create_task(world.ask(question))
            await eventually(lambda: world.clients.streams.is_asked(CLIENT))
            with pytest.raises(RpcError) as many:
                await world.ask(ALL)
            assert refused_as(many.value) == "Overloaded"
            first.cancel()
            await asyncio.wait([first])
            with pytest.raises(RpcError) as slow:
                await world.ask(question, timeout_ms=1)
            assert refused_as(slow.value) == "ProxyUnreachable"

    run(scenario)


def test_a_proxy_that_does_not_read_gets_no_more_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokerEnd, "unsent_bytes", broker_relay.UNSENT_BYTES_MAX)

    async def scenario(world: World) -> None:
        with pytest.raises(RpcError) as refused:
            await world.ask(ALL)
        assert refused_as(refused.value) == "Overloaded"

    run(scenario)


def test_a_page_ends_where_the_settings_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.proxy.clients.questions.PAGE_BYTES_MAX", 100)

    async def scenario(world: World) -> None:
        for n in range(3):
            client = Client(
                client_type=v2.PRODUCER,
                group="",
                language="",
                version="",
                seen_at_ms=world.clock.monotonic_ms(),
            )
            settings = v2.Settings(user_agent=v2.UA(hostname="h" * 60)).SerializeToString()
            world.clients.record(ClientKey(f"c{n}"), client, settings, connection=n)
        answer = await world.ask(ALL)
        assert [state.client_id for state in answer.clients.clients] == ["c0", "c1"]
        assert answer.clients.has_more

    run(scenario)


def test_a_proxy_leaves_a_broker_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.proxy.clients.relay.REFRESH_PERIOD_S", 0.0)

    async def scenario(world: World) -> None:
        await world.proxy()
        world.addresses.clear()
        await eventually(lambda: not world.relay._attached)

    run(scenario)


def test_anonymous_and_excess_streams_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_relay, "PROXIES_MAX", 0)

    async def attach(first: bytes) -> RpcCode:
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        answers.put_nowait(first)
        with pytest.raises(RpcError) as refused:
            await Relay(Producers()).attach(BrokerEnd(answers, lambda _message: None))
        return refused.value.code

    name = pb.ProxyAnswer(proxy=pb.ProxyName(process_id=b"id", name="p")).SerializeToString()
    assert asyncio.run(attach(b"")) is RpcCode.INVALID_ARGUMENT
    assert asyncio.run(attach(b"\xff")) is RpcCode.INVALID_ARGUMENT
    assert asyncio.run(attach(name)) is RpcCode.RESOURCE_EXHAUSTED
