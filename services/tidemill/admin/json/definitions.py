"""The JSON of definitions: the configuration of a cluster in one file."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from tidemill.admin.json.consumer_groups import ConsumerGroupSettings
from tidemill.admin.json.operations import OperationView
from tidemill.admin.json.quotas import QuotaFields, QuotaKindView
from tidemill.admin.json.schema import BY, DRY_RUN, AnyCaseEnum, Schema, Text
from tidemill.admin.json.security import RoleFields, SubjectName, UserFields
from tidemill.admin.json.topics import TopicFields


class TopicDefinition(TopicFields):
    """A topic."""

    name: Text = Field(min_length=1, description="Name of the topic.", examples=["orders"])


class GroupDefinition(ConsumerGroupSettings):
    """A consumer group."""

    name: Text = Field(min_length=1, description="Name of the group.", examples=["billing"])


class RoleDefinition(RoleFields):
    """A role."""

    name: SubjectName = Field(description="Name of the role.", examples=["sellers"])


class UserDefinition(UserFields):
    """A user, without its secrets."""

    name: SubjectName = Field(description="Name of the user.", examples=["orders-service"])


class QuotaDefinition(QuotaFields):
    """The limits of a subject."""

    kind: QuotaKindView = Field(description="Kind of the subject.")
    subject: Text = Field(
        min_length=1, max_length=255, description="The subject.", examples=["orders-service"]
    )


class Definitions(Schema):
    """The configuration of a cluster. A kind without a list is left alone."""

    version: Literal[1] = Field(1, description="Version of the format.")
    roles: list[RoleDefinition] | None = Field(
        None, description="The roles that are not ready-made."
    )
    users: list[UserDefinition] | None = Field(
        None, description="The users. Without secrets: rotate a new user to get one."
    )
    topics: list[TopicDefinition] | None = Field(None, description="The topics.")
    groups: list[GroupDefinition] | None = Field(None, description="The consumer groups.")
    quotas: list[QuotaDefinition] | None = Field(None, description="The quotas.")


class DefinitionKind(StrEnum):
    """The kind of a defined object."""

    ROLE = "role"
    USER = "user"
    TOPIC = "topic"
    GROUP = "group"
    QUOTA = "quota"


class DefinitionAction(StrEnum):
    """What happens with an object."""

    CREATE = "CREATE"
    CHANGE = "CHANGE"
    DELETE = "DELETE"


class DefinitionChangeView(Schema):
    """A change of one object."""

    kind: DefinitionKind = Field(description="Kind of the object.")
    name: str = Field(description="Its name; of a quota: KIND/SUBJECT.")
    action: DefinitionAction = Field(description="What happens with it.")
    before: dict[str, Any] | None = Field(
        None, description="Previous settings. Missing if it is new."
    )
    after: dict[str, Any] | None = Field(
        None, description="Settings after. Missing if it is deleted."
    )
    loss: dict[str, Any] | None = Field(
        None,
        description="The data that a deletion removes, as the dry run of the deletion counts it."
        " Missing if there is none.",
    )
    note: str | None = Field(None, description="What to do afterwards, or a side effect.")


class DefinitionsApplyView(Schema):
    """The changes that make the cluster as the file defines it."""

    dry_run: bool = DRY_RUN
    by: str = BY
    changes: list[DefinitionChangeView] = Field(description="The changes, in their order.")
    etag: str = Field(
        description="ETag of the definitions that were compared, for `If-Match` of the call."
    )
    operation: OperationView | None = Field(
        None, description="The operation that makes them. Missing in a dry run, or without changes."
    )


class ConversionSource(AnyCaseEnum):
    """The broker that exported a file."""

    RABBITMQ = "rabbitmq"
    ROCKETMQ = "rocketmq"


class ConversionOutcome(StrEnum):
    """What became of an object of the source."""

    CONVERTED = "CONVERTED"
    CHANGED = "CHANGED"
    SKIPPED = "SKIPPED"


class ConvertedObjectView(Schema):
    """An object of the source."""

    source: str = Field(description="Kind and name in the source.", examples=["queue / orders"])
    outcome: ConversionOutcome = Field(
        description="CHANGED: it works differently here; SKIPPED: it is not in our file."
    )
    target: str | None = Field(
        None, description="What it became.", examples=["topic orders", "group billing"]
    )
    reason: str | None = Field(None, description="Why it was changed or skipped.")


class ConversionView(Schema):
    """Definitions that were converted from another broker."""

    definitions: Definitions = Field(description="Our file.")
    report: list[ConvertedObjectView] = Field(description="One row for each object of the source.")


ForeignFile = dict[str, Any]
