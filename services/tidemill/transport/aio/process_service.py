"""Questions of operators to this process: what it is, its settings, log and slow calls.

Brokers and controllers serve them as `ProcessAdmin` on their ports, a proxy on its question stream,
and the admin process asks itself without a connection (ADR 0094).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import structlog
from pydantic_settings import CLI_SUPPRESS

from tidemill.common.errors import BadRequest, ServiceError
from tidemill.common.feature_level import FEATURE_LEVEL
from tidemill.common.log import LEVEL, change_level, recent_lines
from tidemill.common.version import commit, version
from tidemill.stubs.tidemill.process.v1 import process_pb2 as pb
from tidemill.transport.aio.services import unary_methods

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.common.settings import ProcessSettings
    from tidemill.common.slow_calls import SlowCall, SlowCalls
    from tidemill.transport.aio.call import RpcMethod
    from tidemill.transport.aio.tls import Certificates

SERVICE: Final = pb.DESCRIPTOR.services_by_name["ProcessAdmin"]
LEVELS: Final = ("debug", "info", "warning", "error")
SHOWS_CHANGES: Final = ("debug", "info")
LOG_LEVEL_MS_MAX: Final = 86_400_000  # of a changed log level
SLOW_CALLS_A_REPLY: Final = 1_000

log = structlog.get_logger()


@final
class ProcessService:
    """The answers of this process."""

    def __init__(
        self,
        kind: str,
        name: str,
        settings: ProcessSettings,
        wall_ms: Callable[[], int],
        *,
        is_ready: Callable[[], bool],
        certificates: Certificates,
        slow_calls: SlowCalls | None = None,
    ) -> None:
        """`kind` is admin, broker, controller or proxy, and `name` is unique in the cluster."""
        self.name = name
        self.address = ""  # that it serves
        self._kind = kind
        self._settings = settings
        self._wall_ms = wall_ms
        self._is_ready = is_ready
        self._certificates = certificates
        self._slow_calls = slow_calls
        self._started_at_ms = wall_ms()
        self._level_of_settings = settings.log_level
        self._revert: asyncio.TimerHandle | None = None
        self._level_until_ms = 0

    def methods(self) -> Mapping[str, RpcMethod]:
        """Return the methods of `ProcessAdmin` by path."""
        return unary_methods(SERVICE, self)

    async def Ask(self, question: pb.ProcessQuestion) -> pb.ProcessAnswer:
        """Answer a question, or say why not."""
        return self.answer(question)

    def answer(self, question: pb.ProcessQuestion) -> pb.ProcessAnswer:
        """Answer a question, or say why not."""
        answer = pb.ProcessAnswer(name=self.name)
        try:
            match question.WhichOneof("question"):
                case "describe":
                    answer.description.CopyFrom(self._describe())
                case "get_settings":
                    answer.settings.CopyFrom(self._list_settings())
                case "set_log_level":
                    answer.log_levels.CopyFrom(self._set_log_level(question.set_log_level))
                case "find_slow_calls":
                    answer.slow_calls.CopyFrom(self._find_slow_calls(question.find_slow_calls))
                case "read_log":
                    answer.log_lines.lines.extend(recent_lines())
                case _:
                    raise BadRequest(f"{self.name} is older than the question; upgrade it")
        except ServiceError as error:
            answer.error, answer.message = type(error).__name__, error.message
        return answer

    def _describe(self) -> pb.ProcessDescription:
        return pb.ProcessDescription(
            kind=self._kind,
            address=self.address,
            version=version(),
            commit=commit(),
            pid=os.getpid(),
            started_at_ms=self._started_at_ms,
            is_ready=self._is_ready(),
            log_level=LEVEL.text,
            wall_ms=self._wall_ms(),
            feature_level=FEATURE_LEVEL,
            log_level_until_ms=self._level_until_ms,
            certificates=pb.CertificateList(
                certificates=[
                    pb.ProcessCertificate(use=each.use, expires_at_ms=each.at_ms or 0)
                    for each in self._certificates.expiries()
                ]
            ),
        )

    def _list_settings(self) -> pb.SettingList:
        values = self._settings.model_dump(mode="json")
        model = type(self._settings)
        defaults = model.model_construct().model_dump(mode="json")
        # Only a supervisor sets the others.
        names = [
            name for name, field in model.model_fields.items() if CLI_SUPPRESS not in field.metadata
        ]
        return pb.SettingList(
            settings=[
                pb.ProcessSetting(
                    name=name,
                    value=json.dumps(values[name]),
                    default_value=json.dumps(defaults.get(name)),
                    source=self._settings.source_of(name),
                )
                for name in sorted(names)
            ]
        )

    def _set_log_level(self, asked: pb.SetLogLevel) -> pb.LogLevels:
        level = asked.level or self._level_of_settings
        if level not in LEVELS:
            raise BadRequest(f"the log level is one of {', '.join(LEVELS)}, not {level!r}")
        if not 0 <= asked.duration_ms <= LOG_LEVEL_MS_MAX:
            raise BadRequest(
                f"a changed log level lasts 1 to {LOG_LEVEL_MS_MAX} ms, not {asked.duration_ms}"
            )
        before = LEVEL.text
        # The level of the settings needs no return.
        is_back = level == self._level_of_settings
        until_ms = 0 if is_back else self._wall_ms() + asked.duration_ms
        if not asked.dry_run:
            if self._revert is not None:
                self._revert.cancel()
                self._revert = None
            _change_level(level, until_ms)
            self._level_until_ms = until_ms
            if not is_back:
                loop = asyncio.get_running_loop()
                self._revert = loop.call_later(asked.duration_ms / 1000, self._return_to_settings)
        return pb.LogLevels(before=before, now=level, until_ms=until_ms)

    def _return_to_settings(self) -> None:
        self._revert, self._level_until_ms = None, 0
        _change_level(self._level_of_settings, until_ms=0)

    def _find_slow_calls(self, asked: pb.FindSlowCalls) -> pb.SlowCallList:
        known = self._slow_calls
        if known is None:
            return pb.SlowCallList()
        limit = min(asked.limit or SLOW_CALLS_A_REPLY, SLOW_CALLS_A_REPLY)
        reply = pb.SlowCallList(slow_call_ms=known.slow_call_ms, count=known.count)
        for call in known.newest_first():
            if len(reply.calls) == limit:
                break
            if _fits(call, asked):
                reply.calls.append(_wire_of(call))
        return reply


def _change_level(level: str, until_ms: int) -> None:
    """Change the log level, and log that with the level that shows the line."""
    fields = {"before": LEVEL.text, "now": level, "until_ms": until_ms}
    hides = level not in SHOWS_CHANGES
    if hides:
        log.info("log level changed", **fields)
    change_level(level)
    if not hides:
        log.info("log level changed", **fields)


def _wire_of(call: SlowCall) -> pb.SlowCall:
    fields = call._asdict()
    if call.parts is not None:
        fields["parts"] = pb.CallParts(**call.parts._asdict())
    return pb.SlowCall(**fields)


def _fits(call: SlowCall, asked: pb.FindSlowCalls) -> bool:
    return (
        call.duration_ms >= asked.duration_ms_min
        and asked.method in {"", call.method}
        and asked.topic in {"", call.topic}
        and asked.client_id in {"", call.client_id}
    )
