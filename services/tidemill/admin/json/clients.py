"""The JSON of connected clients."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictBool, StrictInt

from tidemill.admin.json.conflicts import ConflictView
from tidemill.admin.json.schema import NEXT_PAGE, Schema, Text

CLIENT_TIMEOUT_MS = 5_000  # as in RocketMQ
CLIENT_TIMEOUT_MS_MAX = 20_000  # for slow listeners; the command line waits longer

ClientKind = Literal[
    "producer",
    "pushConsumer",
    "simpleConsumer",
    "pullConsumer",
    "litePushConsumer",
    "liteSimpleConsumer",
    "unknown",
]


class SubscriptionView(Schema):
    """The subscription of a consumer to a topic."""

    topic: str = Field(description="Name of the topic.")
    filter_type: Literal["TAG", "SQL"] = Field(description="Language of the filter.")
    expression: str = Field(description="The filter. * matches every message.")


class ClientProxyView(Schema):
    """A proxy that a client calls."""

    name: str = Field(description="Name of the proxy.")
    address: str = Field(description="Address of the client in its last call.")
    connected_ms: int = Field(description="Time since the first call of the client, in ms.")
    silent_ms: int = Field(description="Time since the last call of the client, in ms.")
    has_stream: bool = Field(
        description="Whether the client has a telemetry stream here, which commands need."
    )


class ClientView(Schema):
    """A client with a call within the last two minutes."""

    client_id: str = Field(description="Id of the client.")
    users: list[str] | None = Field(
        None,
        description="The user of the client. Two users with one id are two clients: a list has"
        " both, and `GET /clients/{clientId}` shows them together, with all users. Missing if the"
        " calls have no user.",
    )
    kind: ClientKind = Field(description="Kind of client, as the client reports it.")
    group: str | None = Field(None, description="Consumer group of a consumer.")
    language: str = Field(description="Language, as the client reports it.")
    version: str = Field(description="Version, as the client reports it.")
    host: str | None = Field(None, description="Host name, as the client reports it.")
    topics: list[str] | None = Field(
        None,
        description="Topics that a producer sends to or a consumer subscribes to. Missing if the"
        " client reported none.",
    )
    subscriptions: list[SubscriptionView] | None = Field(
        None, description="Subscriptions of a consumer. Missing if the client reported none."
    )
    connected_ms: int = Field(description="Time since its first call, in ms.")
    silent_ms: int = Field(description="Time since its last call, in ms.")
    proxies: list[ClientProxyView] = Field(
        description="The proxies that the client calls, the last called one first."
    )
    conflicts: list[ConflictView] | None = Field(
        None,
        description="Ways in which its consumer group loses messages or their order. Missing if"
        " there are none.",
    )
    in_flight: int | None = Field(
        None, description="Number of messages in flight of the client. Missing in lists."
    )
    unreachable: list[str] | None = Field(
        None, description="Unreachable broker groups and proxies."
    )


class ClientListView(Schema):
    """A page of clients."""

    clients: list[ClientView] = Field(
        description="The clients, ordered by id and user. A page ends behind an id, so it may be a"
        " little larger than `pageSize`."
    )
    next_page_token: str | None = NEXT_PAGE
    unreachable: list[str] | None = Field(
        None,
        description="Broker groups and proxies that did not answer or rejected the question. Their"
        " clients may be missing.",
    )


class KickedProxyView(Schema):
    """A kicked client at one proxy."""

    name: str = Field(description="Name of the proxy.")
    polls: int = Field(description="Number of polls and pulls that end.")
    streams: int = Field(description="Number of telemetry streams that end.")


class ClientKickView(Schema):
    """A kicked client, or one that would be kicked."""

    client_id: str = Field(description="Id of the client.")
    dry_run: bool = Field(description="Whether nothing has changed.")
    proxies: list[KickedProxyView] = Field(description="The proxies that knew the client.")
    unreachable: list[str] | None = Field(
        None,
        description="Broker groups and proxies that did not answer. The client may go on there.",
    )


class StackTraceView(Schema):
    """The stack traces of the threads of a client."""

    client_id: str = Field(description="Id of the client.")
    stack: str = Field(description="The stack traces, in the format of the client.")


class VerificationRequest(Schema):
    """The message that a client shall consume."""

    topic: Text = Field(min_length=1, max_length=255, description="Topic of the message.")
    message_id: Text = Field(min_length=1, max_length=1_024, description="Id of the message.")
    timeout_ms: StrictInt = Field(
        CLIENT_TIMEOUT_MS,
        ge=1,
        le=CLIENT_TIMEOUT_MS_MAX,
        description="Timeout of the answer of the client, in ms.",
    )
    force: StrictBool = Field(
        default=False,
        description="Send the message even if the proxies do not know the subscriptions of the"
        " client.",
    )


class VerificationView(Schema):
    """The result of a message that a client consumed on request."""

    client_id: str = Field(description="Id of the client.")
    topic: str = Field(description="Topic of the message.")
    message_id: str = Field(description="Id of the message.")
    consumed: bool = Field(description="Whether the listener reported success.")
    code: int = Field(description="Code of apache.rocketmq.v2 in the answer of the client.")
    reason: str | None = Field(None, description="Message of the answer of the client.")
