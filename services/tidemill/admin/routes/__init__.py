"""The routes of the REST API, one file per resource: validate, call brokers, render."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated, Final

from fastapi import Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from tidemill.admin.activity.sampler import ActivitySampler
from tidemill.admin.audit.author import Author
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.admin.cluster.security_states import wait_for_version
from tidemill.admin.http.actor import CLAIMED_USER_HEADER, Actor, actor_of
from tidemill.admin.http.request_access import RequestAccess, access_of
from tidemill.admin.http.route_templates import PREFIX
from tidemill.admin.json.schema import Schema
from tidemill.admin.messages.compose import Composer
from tidemill.admin.messages.quotas import RestSendQuotas
from tidemill.admin.messages.timer_histogram import TimerHistograms
from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.common.rest_client import UNCONFIRMED_HEADER
from tidemill.message.resource_names import GROUP_CHARS_MAX, TOPIC_CHARS_MAX
from tidemill.security.access_log import AccessLog

# Some 30 names of pods. Some HTTP proxies accept headers of 4 KiB only.
HEADER_CHARS_MAX: Final = 1_000
_COMMA: Final = ", "


def brokers_of(request: Request) -> Brokers:
    """Return the broker groups of the application."""
    brokers = request.app.state.brokers
    assert isinstance(brokers, Brokers)
    return brokers


def demand_queries_of(request: Request) -> DemandQueries:
    """Return the demand queries of the application."""
    demands = request.app.state.demands
    assert isinstance(demands, DemandQueries)
    return demands


def activity_of(request: Request) -> ActivitySampler:
    """Return the numbers of topics and consumer groups."""
    activity = request.app.state.activity
    assert isinstance(activity, ActivitySampler)
    return activity


def timer_histograms_of(request: Request) -> TimerHistograms:
    """Return the histograms of timers of the application."""
    histograms = request.app.state.timer_histograms
    assert isinstance(histograms, TimerHistograms)
    return histograms


def composer_of(request: Request) -> Composer:
    """Return the message composer of the application."""
    composer = request.app.state.composer
    assert isinstance(composer, Composer)
    return composer


def send_quotas_of(request: Request) -> RestSendQuotas | None:
    """Return the quotas of sends; None in an application without a process."""
    quotas = request.app.state.send_quotas
    assert quotas is None or isinstance(quotas, RestSendQuotas)
    return quotas


def json_of(answer: Schema) -> JSONResponse:
    """Render the answer of a route that usually answers without content."""
    return JSONResponse(answer.model_dump(mode="json", by_alias=True, exclude_none=True))


def caller_of(
    actor: Annotated[Actor, Depends(actor_of)],
    _claimed_user: Annotated[
        str,
        Header(
            alias=CLAIMED_USER_HEADER,
            description="Name of the caller, for the log of the broker. The name is not checked;"
            " the log has the address of the caller too.",
        ),
    ] = "",
) -> str:
    """Return the names and the address of the caller, as the logs of brokers show them."""
    return actor.text


def author_of(request: Request, actor: Annotated[Actor, Depends(actor_of)]) -> Author:
    """Return the author of a change."""
    user_id = access_of(request).user_id
    return Author(actor, request.app.state.process, call_of(request), user_id)


def call_of(request: Request) -> str:
    """Return the method and the template of the path: `PUT /topics/{topic}`."""
    template = request.app.state.paths.find(request.scope["path"])
    path = request.scope["path"] if template is None else template.path
    return f"{request.method} {path.removeprefix(PREFIX)}"


def access_log_of(request: Request) -> AccessLog:
    """Return the refused calls and the accesses of this process."""
    known = request.app.state.access_log
    assert isinstance(known, AccessLog)
    return known


def security_items_of(
    cluster: Annotated[Brokers, Depends(brokers_of)], response: Response
) -> SecurityClient:
    """Return the security items. A header of the response names proxies without the change."""

    async def wait(version: int) -> None:
        lacking = (await wait_for_version(cluster, version)).lacking(version)
        if lacking:
            response.headers[UNCONFIRMED_HEADER] = header_text(lacking)

    return SecurityClient(cluster, wait)


def header_text(names: Iterable[str]) -> str:
    """Return names as the value of a header, which has one line and is ASCII.

    The names have at most HEADER_CHARS_MAX characters. The end of a longer value counts the others.
    """
    listed = [" ".join(name.split()).encode("ascii", "replace").decode() for name in names]
    ends = accumulate(len(name) + len(_COMMA) for name in listed)
    shown = sum(end - len(_COMMA) <= HEADER_CHARS_MAX for end in ends)
    shown = max(shown, 1)  # A single name that is too long is cut.
    text = _COMMA.join(listed[:shown])[:HEADER_CHARS_MAX]
    more = len(listed) - shown
    return f"{text}{_COMMA}and {more} more" if more > 0 else text


Cluster = Annotated[Brokers, Depends(brokers_of)]
SecurityItems = Annotated[SecurityClient, Depends(security_items_of)]
Activity = Annotated[ActivitySampler, Depends(activity_of)]
Histograms = Annotated[TimerHistograms, Depends(timer_histograms_of)]
ScalingQueries = Annotated[DemandQueries, Depends(demand_queries_of)]
MessageComposer = Annotated[Composer, Depends(composer_of)]
Caller = Annotated[str, Depends(caller_of)]
SendLimits = Annotated[RestSendQuotas | None, Depends(send_quotas_of)]
Access = Annotated[RequestAccess, Depends(access_of)]
ChangeAuthor = Annotated[Author, Depends(author_of)]
OwnAccessLog = Annotated[AccessLog, Depends(access_log_of)]
# Documented patterns; the rules of names refuse others, with a reason.
NAME = "[A-Za-z0-9_|-]+(%[A-Za-z0-9_|-]+)*"
TopicName = Annotated[
    str,
    Path(
        description="Name of the topic.", json_schema_extra={"pattern": "^[A-Za-z0-9_%|+-]{1,255}$"}
    ),
]
PutTopicName = Annotated[
    str,
    Path(
        description="Name of the topic, or of a dead-letter topic: %DLQ% and the consumer group.",
        json_schema_extra={"pattern": f"^{NAME}$", "maxLength": TOPIC_CHARS_MAX},
    ),
]
OwnTopicName = Annotated[
    str,
    Path(
        description="Name of the topic, not of a retry or dead-letter topic.",
        json_schema_extra={"pattern": f"^{NAME}$", "maxLength": TOPIC_CHARS_MAX},
    ),
]
GroupName = Annotated[
    str,
    Path(
        description="Name of the consumer group.",
        json_schema_extra={"pattern": f"^{NAME}$", "maxLength": GROUP_CHARS_MAX},
    ),
]
BrokerGroupName = Annotated[
    str,
    Path(
        description="Name of the broker group.",
        json_schema_extra={"pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"},
    ),
]
BrokerName = Annotated[
    str | None, Query(alias="broker", description="Name of the broker group that stores it.")
]
Namespace = Annotated[
    str,
    Query(
        description="Only of this namespace, whose names begin with NAMESPACE%.",
        json_schema_extra={"pattern": "^[A-Za-z0-9_|-]{0,118}$"},
    ),
]
DryRun = Annotated[
    bool,
    Query(
        alias="dryRun",
        description="Check the request without a change. Answer 200 with the data that would be"
        " lost.",
    ),
]
