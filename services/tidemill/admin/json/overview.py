"""The JSON of the overview."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tidemill.admin.json.activity import SAMPLED_AT, DeadLetterNumbersView
from tidemill.admin.json.audit import AuditRecordView
from tidemill.admin.json.broker_groups import BrokerGroupView
from tidemill.admin.json.consumer_groups import ConsumerGroupRowView
from tidemill.admin.json.schema import Schema
from tidemill.admin.json.storage import BrokerGroupStorageView
from tidemill.admin.json.topics import TopicRowView


class ClusterStatus(StrEnum):
    """The state of the cluster."""

    OK = "OK"
    DEGRADED = "DEGRADED"
    DOWN = "DOWN"


class Severity(StrEnum):
    """The urgency of a problem, the highest first."""

    CRITICAL = "CRITICAL"  # Some messages cannot be sent.
    WARNING = "WARNING"
    NOTICE = "NOTICE"  # For an operator with time: the state of the cluster stays OK.


class ClusterProblemView(Schema):
    """A fact that needs an operator."""

    code: str = Field(description="Name of the alert.", examples=["MemberUnreachable"])
    severity: Severity = Field(
        description="CRITICAL: some messages cannot be sent. NOTICE: open dead letters; the status"
        " stays OK."
    )
    object: str = Field(description="Name of the broker group or consumer group.")
    text: str = Field(description="The problem, as a sentence.")
    since_ms: int | None = Field(
        None, description="Duration of the problem, in ms. Missing if it is unknown."
    )
    runbook: str = Field(description="Path of the runbook in the documentation.")
    command: str = Field(description="A command that shows more.")


class ProcessCertificateView(Schema):
    """A certificate of a process; or a process with unknown certificates."""

    process: str = Field(description="Name of the process.", examples=["proxy-0"])
    use: str | None = Field(
        None,
        description="Its use, as in `GET /processes`. Missing if the certificates of the process"
        " are unknown.",
        examples=["clients"],
    )
    expires_at_ms: int | None = Field(
        None, description="When it expires (Unix, ms). Missing if it is unknown."
    )
    unknown: str | None = Field(None, description="Why it is unknown.", examples=["no answer"])


class OverviewView(Schema):
    """The state of the cluster, as far as the caller may see it. A missing part needs a right."""

    status: ClusterStatus = Field(
        description="OK: no problem is known, except notices. DEGRADED: there are problems. DOWN:"
        " all broker groups are unreachable."
    )
    problems: list[ClusterProblemView] = Field(description="The problems, the most urgent first.")
    broker_groups: list[BrokerGroupView] | None = Field(
        None, description="The broker groups, the home first."
    )
    disks: list[BrokerGroupStorageView] | None = Field(
        None, description="The disks of the broker groups."
    )
    groups: list[ConsumerGroupRowView] | None = Field(
        None, description="The consumer groups that are furthest behind, at most five."
    )
    topics: list[TopicRowView] | None = Field(None, description="The largest topics, at most five.")
    next_due_at_ms: int | None = Field(
        None,
        description="When the next delayed message is due (Unix, ms). Missing if there is none.",
    )
    dead_letters: DeadLetterNumbersView | None = Field(
        None, description="The dead letters of all consumer groups. Missing without a sample."
    )
    certificates: list[ProcessCertificateView] | None = Field(
        None,
        description="The certificates of all processes, the first to expire first; those with an"
        " unknown end come before them. At most 30 s old.",
    )
    changes: list[AuditRecordView] | None = Field(
        None, description="The last changes, at most ten."
    )
    unanswered: list[str] | None = Field(
        None, description="Parts that did not answer within two seconds."
    )
    sampled_at_ms: int | None = SAMPLED_AT
    unreachable: list[str] | None = Field(
        None,
        description="Broker groups without numbers in this answer, and `controllers` if none of"
        " them answers: then the replicas of the broker groups are unknown.",
    )
