"""The JSON of connected clients."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidemill.admin.json.schema import Schema, Text

CLIENT_TIMEOUT_MS = 5_000  # as long as the reference waits
CLIENT_TIMEOUT_MS_MAX = 20_000  # a listener may take its time; the command line waits longer

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
    """What a consumer wants of a topic."""

    topic: str = Field(description="Name of the topic.")
    filter_type: Literal["TAG", "SQL"] = Field(description="Language of the filter.")
    expression: str = Field(description="The filter; * lets every message through.")


class ClientProxyView(Schema):
    """A proxy that a client calls."""

    name: str = Field(description="Name of the proxy.")
    address: str = Field(description="Where the client called it from last.")
    connected_ms: int = Field(description="How long ago the proxy heard of it first.")
    silent_ms: int = Field(description="How long ago the proxy heard of it last.")
    has_stream: bool = Field(description="Whether it can be asked through this proxy.")


class ClientView(Schema):
    """A client that gave a sign of life within two minutes."""

    client_id: str = Field(description="Its id.")
    kind: ClientKind = Field(description="What it says to be.")
    group: str | None = Field(None, description="Consumer group of a consumer.")
    language: str = Field(description="What it says of its language.")
    version: str = Field(description="What it says of its version.")
    host: str | None = Field(None, description="What it says of its machine.")
    topics: list[str] | None = Field(
        None,
        description="Topics that a producer has announced, or a consumer subscribes to; missing"
        " where it announced nothing.",
    )
    subscriptions: list[SubscriptionView] | None = Field(
        None, description="What a consumer wants of each topic; missing where it announced nothing."
    )
    connected_ms: int = Field(description="How long ago it was heard first.")
    silent_ms: int = Field(description="How long ago it was heard last.")
    proxies: list[ClientProxyView] = Field(
        description="The proxies that it calls, the one that heard it last first."
    )
    in_flight: int | None = Field(
        None,
        description="Messages that it popped and that are not acked; of one client alone, and not"
        " in lists.",
    )
    unreachable: list[str] | None = Field(
        None, description="Broker groups and proxies that could not be asked."
    )


class ClientListView(Schema):
    """Some clients."""

    clients: list[ClientView] = Field(description="The clients, by their ids.")
    next_page_token: str | None = Field(
        None, description="To get the next page with; missing on the last."
    )
    unreachable: list[str] | None = Field(
        None,
        description="Broker groups and proxies whose clients may be missing here; and why, of those"
        " that are there and refuse.",
    )


class StackTraceView(Schema):
    """What the threads of a client are doing."""

    client_id: str = Field(description="Its id.")
    stack: str = Field(description="As the client writes it.")


class VerificationRequest(Schema):
    """Which message a client is to consume."""

    topic: Text = Field(min_length=1, max_length=255, description="Topic of the message.")
    message_id: Text = Field(
        min_length=1, max_length=1_024, description="Id that its producer got."
    )
    timeout_ms: int = Field(
        CLIENT_TIMEOUT_MS,
        ge=1,
        le=CLIENT_TIMEOUT_MS_MAX,
        description="How long to wait for its answer.",
    )
    force: bool = Field(
        default=False,
        description="Also where the proxies do not know what the client subscribes to.",
    )


class VerificationView(Schema):
    """What came of a message that a client was to consume."""

    client_id: str = Field(description="Id of the client.")
    topic: str = Field(description="Topic of the message.")
    message_id: str = Field(description="Its id.")
    consumed: bool = Field(description="Whether its listener said that it consumed the message.")
    code: int = Field(description="Code of the protocol that the client has answered with.")
    reason: str | None = Field(None, description="What the client says of it.")
