"""Processes: what runs, with which settings; log levels and slow calls."""

from __future__ import annotations

import json
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query, Request

from tidemill.admin.audit.controller_actions import recorded
from tidemill.admin.cluster.processes import ProcessAnswered, Processes
from tidemill.admin.json.processes import (
    PARTS_UNKNOWN,
    CertificateView,
    LogLevelListView,
    LogLevelRequest,
    LogLevelView,
    ProcessListView,
    ProcessView,
    SettingListView,
    SettingView,
    SlowCallListView,
    SlowCallPartsView,
    SlowCallView,
)
from tidemill.admin.routes import ChangeAuthor, Cluster, DryRun
from tidemill.stubs.tidemill.process.v1 import process_pb2 as pb

router = APIRouter(tags=["processes"])

ALL: Final = "*"
SLOW_CALLS_MAX: Final = 1_000
NO_EXPIRY: Final = "the process cannot read the end of this certificate"


def processes_of(request: Request) -> Processes:
    """Return the processes of the cluster."""
    processes = request.app.state.processes
    assert isinstance(processes, Processes)
    return processes


All = Annotated[Processes, Depends(processes_of)]
ProcessName = Annotated[
    str,
    Path(
        description="Name of the process.",
        json_schema_extra={"pattern": "^[A-Za-z0-9*][A-Za-z0-9._-]{0,252}$"},
    ),
]


@router.get("/processes", response_model_exclude_none=True)
async def list_processes(processes: All) -> ProcessListView:
    """List all processes of the cluster: brokers with their replicas, controllers and proxies.

    Of several admin processes, only the one that answers is listed.
    """
    found = await processes.ask_all(pb.ProcessQuestion(describe=pb.DescribeProcess()))
    return ProcessListView(
        items=[_described(each) for each in found.answers], unreachable=found.unreachable or None
    )


@router.get("/processes/{process}", response_model_exclude_none=True)
async def get_process(process: ProcessName, processes: All) -> ProcessView:
    """Show a process."""
    question = pb.ProcessQuestion(describe=pb.DescribeProcess())
    return _described(await processes.ask(process, question))


@router.get("/processes/{process}/settings")
async def list_process_settings(process: ProcessName, processes: All) -> SettingListView:
    """List the settings in effect in a process, and where each value comes from."""
    question = pb.ProcessQuestion(get_settings=pb.GetSettings())
    found = (await processes.ask(process, question)).value
    return SettingListView(
        process=found.name,
        items=[
            SettingView.model_validate(
                {
                    "name": each.name,
                    "value": json.loads(each.value),
                    "default": json.loads(each.default_value),
                    "source": each.source,
                }
            )
            for each in found.settings.settings
        ],
    )


@router.put("/processes/{process}/log-level", response_model_exclude_none=True)
async def set_log_level(
    process: ProcessName,
    wish: LogLevelRequest,
    processes: All,
    cluster: Cluster,
    author: ChangeAuthor,
    is_dry: DryRun = False,
) -> LogLevelListView:
    """Change the log level of a process for some time, or of all processes with the name `*`."""
    change = pb.SetLogLevel(level=wish.level or "", duration_ms=wish.for_ms, dry_run=is_dry)
    question = pb.ProcessQuestion(set_log_level=change)

    async def act() -> LogLevelListView:
        if process == ALL:
            found = await processes.ask_all(question)
            answers, unreachable = found.answers, found.unreachable
        else:
            answers, unreachable = [await processes.ask(process, question)], []
        return LogLevelListView(
            items=[_levels(each.value) for each in answers], unreachable=unreachable or None
        )

    if is_dry:
        return await act()
    after = {"logLevel": wish.level or "that of its settings", "forMs": wish.for_ms}
    return await recorded(cluster, author.of(f"Process:{process}"), act, after=after)


@router.get("/slow-calls", response_model_exclude_none=True)
async def list_slow_calls(
    processes: All,
    min_ms: Annotated[
        int, Query(alias="minMs", ge=0, description="Only calls that took at least this time.")
    ] = 0,
    method: Annotated[str, Query(description="Only calls of this method.")] = "",
    topic: Annotated[str, Query(description="Only calls for this topic.")] = "",
    client: Annotated[str, Query(description="Only calls of the client with this id.")] = "",
) -> SlowCallListView:
    """List the last calls of clients that took at least `slow_call_ms`, the newest first.

    Each proxy keeps its last 1,000 slow calls until its end. Receives and pulls wait for messages,
    so they are not slow calls.
    """
    asked = pb.FindSlowCalls(duration_ms_min=min_ms, method=method, topic=topic, client_id=client)
    found = await processes.ask_all(pb.ProcessQuestion(find_slow_calls=asked))
    items = [
        SlowCallView(
            process=answer.value.name,
            at_ms=call.at_ms,
            method=call.method,
            duration_ms=call.duration_ms,
            topic=call.topic or None,
            group=call.group or None,
            client_id=call.client_id or None,
            code=call.code,
            parts=_parts_of(call),
            parts_unknown=None if call.HasField("parts") else PARTS_UNKNOWN,
        )
        for answer in found.answers
        for call in answer.value.slow_calls.calls
    ]
    items.sort(key=lambda each: -each.at_ms)
    return SlowCallListView(items=items[:SLOW_CALLS_MAX], unreachable=found.unreachable or None)


def _parts_of(call: pb.SlowCall) -> SlowCallPartsView | None:
    if not call.HasField("parts"):
        return None
    parts = call.parts
    return SlowCallPartsView(
        queue_ms=parts.queue_ms if parts.HasField("queue_ms") else None,
        broker_ms=parts.broker_ms,
        sync_ms=parts.sync_ms if parts.HasField("sync_ms") else None,
        replicate_ms=parts.replicate_ms if parts.HasField("replicate_ms") else None,
    )


def _described(answered: ProcessAnswered) -> ProcessView:
    name, found = answered.value.name, answered.value.description
    return ProcessView(
        name=name,
        kind=found.kind,
        address=found.address,
        version=found.version,
        commit=found.commit or None,
        feature_level=found.feature_level,
        pid=found.pid,
        started_at_ms=found.started_at_ms,
        ready=found.is_ready,
        log_level=found.log_level,
        log_level_until_ms=found.log_level_until_ms or None,
        clock_skew_ms=answered.skew_ms,
        certificates=certificates_of(found),
    )


def certificates_of(found: pb.ProcessDescription) -> list[CertificateView] | None:
    """Return the certificates of a process by use; None if it does not report them."""
    if not found.HasField("certificates"):
        return None
    return [
        CertificateView(
            use=each.use,
            expires_at_ms=each.expires_at_ms or None,
            unknown=None if each.expires_at_ms else NO_EXPIRY,
        )
        for each in sorted(found.certificates.certificates, key=lambda each: each.use)
    ]


def _levels(answer: pb.ProcessAnswer) -> LogLevelView:
    levels = answer.log_levels
    return LogLevelView(
        process=answer.name,
        before=levels.before,
        level=levels.now,
        until_ms=levels.until_ms or None,
    )
