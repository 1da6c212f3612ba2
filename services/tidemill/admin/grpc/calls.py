"""A call of the service Admin as its method sees it, and the parts of its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from google.protobuf.message import Message

from tidemill.common.errors import BadRequest, NotBuilt
from tidemill.message.encoding import TIMESTAMP_SECONDS_MAX
from tidemill.message.resources import ResourceName
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from tidemill.admin.audit.author import Author
    from tidemill.admin.cluster.brokers import Brokers
    from tidemill.admin.http.request_access import RequestAccess
    from tidemill.admin.messages.compose import Composer
    from tidemill.admin.messages.quotas import RestSendQuotas
    from tidemill.security.access_log import AccessLog

LISTED_MAX: Final = 1_000  # clients of one answer
NO_LITE_TOPICS: Final = "lite topics are not served yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """Parts of the process that the calls use: the same objects as those of the REST API."""

    brokers: Brokers
    composer: Composer
    quotas: RestSendQuotas | None
    access_log: AccessLog
    cluster: str
    process: str


@dataclass(frozen=True, slots=True)
class AdminCall:
    """One call, after the checks of its credentials and rights."""

    parts: AdminParts
    access: RequestAccess
    author: Author
    resources: Mapping[str, ResourceName]  # the topic and the group of the request, if it has them

    @property
    def brokers(self) -> Brokers:
        """The broker groups."""
        return self.parts.brokers

    @property
    def topic(self) -> str:
        """The full name of the topic; "": none."""
        return self.resources["topic"].full if "topic" in self.resources else ""

    @property
    def group(self) -> str:
        """The full name of the consumer group; "": none."""
        return self.resources["group"].full if "group" in self.resources else ""

    def resource(self, full: str) -> v2.Resource:
        """Return a topic or consumer group in the namespace of the request."""
        namespace = next((each.namespace for each in self.resources.values()), "")
        return ResourceName(full, namespace).resource()


Handler: TypeAlias = Callable[[AdminCall, Any], Awaitable[Message]]


def ok(*notes: str) -> v2.Status:
    """Return the status of a success. `notes` name the missing parts of the answer."""
    return v2.Status(code=v2.OK, message="; ".join(note for note in notes if note) or "ok")


def missing_note(unreachable: Sequence[str] | None) -> str:
    """Return a note that names unreachable processes; "": there are none."""
    return f"without {', '.join(unreachable)}, which cannot be reached" if unreachable else ""


def refuse_lite_topic(request: Message) -> None:
    """Raise NotBuilt if a request names a lite topic."""
    name = "liteTopic" if "liteTopic" in request.DESCRIPTOR.fields_by_name else "lite_topic"
    if request.HasField(name):
        raise NotBuilt(NO_LITE_TOPICS)


def millis_of(at: Timestamp, name: str) -> int:
    """Return a time in ms. Raises BadRequest outside the years 1970 to 9999."""
    if not (0 <= at.seconds <= TIMESTAMP_SECONDS_MAX and 0 <= at.nanos < 1_000_000_000):
        raise BadRequest(f"{name} is outside the years 1970 to 9999")
    return at.seconds * 1_000 + at.nanos // 1_000_000
