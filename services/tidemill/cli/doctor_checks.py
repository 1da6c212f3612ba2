"""Checks of `tidemill doctor`: each reads answers of the REST API and returns one finding."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from tidemill.common.rest_client import Json
from tidemill.common.times import span

CLOCK_SKEW_MS_MAX: Final = 500  # more moves the delivery times of delayed messages
DISK_USED_RATIO_MAX: Final = 0.85  # the threshold of the alert DiskFull
CERTIFICATE_DAYS_MIN: Final = 14  # the threshold of the alert CertificateExpires
OBJECTS_SHOWN_MAX: Final = 5  # in a finding; --output json has all
DAY_MS: Final = 86_400_000
NO_POLL_MS: Final = 60_000  # as in the diagnosis of a consumer group
STALLED_MAX: Final = 20  # consumer groups that are diagnosed, each by one call
NOT_POLLING: Final = "NOT_POLLING"  # code of the finding of a diagnosis
# Settings that each process has for itself: its name, its addresses, its folders and its files.
OWN_SETTINGS: Final = frozenset(
    {
        "name",
        "node_id",
        "config",
        "host",
        "port",
        "grpc_host",
        "grpc_port",
        "grpc_reuse_port",
        "reuse_port",
        "metrics_host",
        "metrics_port",
        "admin_grpc_port",
        "scaler_host",
        "scaler_port",
        "advertised_address",
        "data_dir",
        "replica_address",
        "replica_id",
        "replica_name",
        "group_store",
        "deputy_rank",
        "supervisor_fd",
        "controllers_fd",
        "keeper_fd",
    }
)


class CheckState(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTICE = "notice"  # for an operator with time, as in `cluster show`
    UNKNOWN = "unknown"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question without an answer, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The finding of a check, and the command that shows more."""

    name: str
    state: CheckState
    text: str
    command: str
    objects: Sequence[str] = ()  # all objects with the problem, which `text` may shorten

    def as_json(self) -> Json:
        """Return the document of --output json."""
        return {
            "check": self.name,
            "state": self.state.value,
            "finding": self.text,
            "objects": list(self.objects),
            "command": self.command,
        }


def checked(
    name: str, command: str, *, fine: str, problems: Sequence[str], unknown: Sequence[str] = ()
) -> CheckResult:
    """Return the problem if there is one, else the unknown part, else a success."""
    unknown_text = f"unknown: {_listed(unknown)}" if unknown else ""
    if problems:
        text = "; ".join(filter(None, (_listed(problems), unknown_text)))
        state = CheckState.PROBLEM
    elif unknown:
        text, state = unknown_text, CheckState.UNKNOWN
    else:
        text, state = fine, CheckState.OK
    return CheckResult(name=name, state=state, text=text, command=command, objects=problems)


def _listed(items: Sequence[str]) -> str:
    more = len(items) - OBJECTS_SHOWN_MAX
    return ", ".join(items[:OBJECTS_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def check_versions(processes: Json) -> CheckResult:
    """Compare the versions, and the commits of images."""
    names: dict[str, list[str]] = defaultdict(list)
    for each in processes["items"]:
        commit = f" ({each['commit'][:12]})" if each.get("commit") else ""
        names[f"{each['version']}{commit}"].append(each["name"])
    problems = [f"{version}: {_listed(users)}" for version, users in sorted(names.items())]
    return checked(
        "versions",
        "tidemill process list",
        fine=f"{len(processes['items'])} processes run {', '.join(names)}",
        problems=problems if len(problems) > 1 else [],
        unknown=processes.get("unreachable") or (),
    )


def check_clocks(processes: Json) -> CheckResult:
    """Compare the clocks with the clock of the admin process."""
    return checked(
        "clocks",
        "tidemill process list",
        fine=f"all clocks are within {CLOCK_SKEW_MS_MAX} ms",
        problems=[
            f"{each['name']} {each['clockSkewMs']:+} ms"
            for each in processes["items"]
            if abs(each["clockSkewMs"]) > CLOCK_SKEW_MS_MAX
        ],
        unknown=processes.get("unreachable") or (),
    )


def check_readiness(processes: Json) -> CheckResult:
    """Find processes that do not answer, or that are not ready."""
    silent = [f"{name} is unreachable" for name in processes.get("unreachable") or ()]
    unready = [f"{one['name']} is not ready" for one in processes["items"] if not one["ready"]]
    return checked(
        "processes",
        "tidemill process list",
        fine=f"{len(processes['items'])} processes are ready",
        problems=silent + unready,
    )


def check_broker_groups(listed: Json) -> CheckResult:
    """Find broker groups that do not answer, or that have a known problem."""
    problems = []
    for each in listed["items"]:
        if not each["reachable"]:
            silent = f" for {span(each['unreachableMs'])}" if "unreachableMs" in each else ""
            problems.append(f"{each['name']} is unreachable{silent}")
        elif "reason" in each:
            problems.append(f"{each['name']}: {each['reason']}")
    return checked(
        "broker groups",
        "tidemill broker-group list",
        fine=f"{len(listed['items'])} broker groups are reachable",
        problems=problems,
    )


def check_replicas(listed: Json) -> CheckResult:
    """Find alarms of broker groups, and replicas that would not take over."""
    problems = []
    for group in listed["items"]:
        if "alarm" in group:
            problems.append(f"{group['name']}: {group['alarm']}")
        for each in group["replicas"]:
            faults = [] if each["role"] in {"master", "in-sync", "retired"} else ["is not in sync"]
            faults += [f"is {fault}" for fault in ("diverged", "unclean") if each[fault]]
            faults += ["has a full disk"] if each["full"] else []
            name = f"{group['name']}-{each['replica']}"
            problems += [f"{name} {' and '.join(faults)}"] if faults else []
    return checked(
        "replicas", "tidemill replica list", fine="all replicas are in sync", problems=problems
    )


def check_disks(storage: Json) -> CheckResult:
    """Find disks that reject messages, or that soon will."""
    problems, used = [], [0.0]
    for each in storage["brokerGroups"]:
        ratio = 1 - each["freeBytes"] / max(each["totalBytes"], 1)
        used.append(ratio)
        if each["isFull"]:
            problems.append(f"{each['broker']} is full and rejects messages")
        elif ratio > DISK_USED_RATIO_MAX:
            problems.append(f"{each['broker']} is used to {ratio:.0%}")
    return checked(
        "disks",
        "tidemill storage show",
        fine=f"at most {max(used):.0%} of a disk are used",
        problems=problems,
        unknown=storage.get("unreachable") or (),
    )


def check_certificates(
    expires_at_ms: int | Unanswered | None, processes: Json | Unanswered, *, now_ms: int
) -> CheckResult:
    """Check the ends of the certificates of all processes, and of the one that this command sees.

    `expires_at_ms` is the end of the certificate of the admin API, None with plain HTTP. A load
    balancer before the admin process may have its own certificate.
    """
    ends: list[tuple[int, str]] = []
    unknown = []
    if isinstance(expires_at_ms, Unanswered):
        unknown.append(expires_at_ms.reason)
    elif expires_at_ms is not None:
        ends.append((expires_at_ms, "the certificate of the admin API"))
    if isinstance(processes, Unanswered):
        unknown.append(f"certificates of all processes ({processes.reason})")
    else:
        unknown += [f"certificates of {each}" for each in processes.get("unreachable") or ()]
        for process in processes["items"]:
            if "certificates" not in process:
                unknown.append(f"certificates of {process['name']} (an older version)")
            for each in process.get("certificates", ()):
                name = f"the certificate {each['use']} of {process['name']}"
                if "expiresAtMs" in each:
                    ends.append((each["expiresAtMs"], name))
                else:
                    unknown.append(f"{name} ({each['unknown']})")
    ends.sort()
    fine = "no process has a certificate, and the admin API uses plain HTTP"
    if ends:
        fine = f"the first certificate expires in {(ends[0][0] - now_ms) // DAY_MS} days"
    return checked(
        "certificates",
        "tidemill process list",
        fine=fine,
        problems=[
            f"{name} has expired" if end <= now_ms else f"{name} expires in {span(end - now_ms)}"
            for end, name in ends
            if end - now_ms < CERTIFICATE_DAYS_MIN * DAY_MS
        ],
        unknown=unknown,
    )


def find_stalled(groups: Sequence[Json], now_ms: int) -> list[str]:
    """Return the names of consumer groups whose consumers may not poll, the longest lag first."""
    found = [
        each
        for each in groups
        if each.get("ready")
        and each.get("consumers")
        and each.get("outPerSecond") == 0
        and each.get("state") != "PAUSED"
        and now_ms - each.get("oldestUnackedAtMs", now_ms) > NO_POLL_MS
    ]
    found.sort(key=lambda each: -each["ready"])
    return [each["name"] for each in found[:STALLED_MAX]]


def check_consumers(
    groups: Sequence[Json],
    *,
    diagnoses: Mapping[str, Json | Unanswered] = MappingProxyType({}),
    unseen: Sequence[str] = (),
) -> CheckResult:
    """Find consumer groups with a backlog and no consumer, or with consumers that do not poll.

    `diagnoses` are those of stalled groups. `unseen` describes groups that are not in the list.
    """
    idle = [
        each
        for each in groups
        if each.get("lag") and each.get("consumers") == 0 and each.get("state") != "PAUSED"
    ]
    idle.sort(key=lambda each: -each["lag"])
    unpolled, undiagnosed = [], []
    for name, answer in diagnoses.items():
        if isinstance(answer, Unanswered):
            undiagnosed.append(f"{name} ({answer.reason})")
        elif any(each["code"] == NOT_POLLING for each in answer["findings"]):
            unpolled.append(name)
    first = [*(each["name"] for each in idle), *unpolled][:1]
    return checked(
        "consumers",
        f"tidemill group show {first[0]}" if first else "tidemill group list --sort=-lag",
        fine="each consumer group with a backlog has a consumer that polls, or is paused",
        problems=[
            *(f"{each['name']} has {each['lag']} messages and no consumer" for each in idle),
            *(f"{name} has ready messages, and no connected consumer polls" for name in unpolled),
        ],
        unknown=[*unseen, *undiagnosed, *(each["name"] for each in groups if "unknown" in each)],
    )


def check_dead_letters(summary: Json, *, unseen: Sequence[str] = ()) -> CheckResult:
    """Find consumer groups with open dead letters: a notice. `unseen` is not in the summary."""
    given_up = sorted(
        (each for each in summary["groups"] if each["open"]), key=lambda one: -one["open"]
    )
    group = f" --group {given_up[0]['group']} --state open" if given_up else " --state open"
    unknown = [*unseen, *(summary.get("unreachable") or ())]
    found = checked(
        "dead letters",
        f"tidemill dead-letter list{group}",
        fine="there is no open dead letter",
        problems=[f"{each['group']} has {each['open']}" for each in given_up],
        unknown=unknown,
    )
    if found.state is not CheckState.PROBLEM:
        return found
    return replace(found, state=CheckState.UNKNOWN if unknown else CheckState.NOTICE)


def check_settings(
    kinds: Mapping[str, str], settings: Mapping[str, Json | Unanswered]
) -> CheckResult:
    """Find settings that differ between processes of one kind.

    `kinds` has the kind of each process, and `settings` the settings of those that were asked.
    """
    values: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unknown = []
    for process, answer in settings.items():
        if isinstance(answer, Unanswered):
            unknown.append(f"{process} ({answer.reason})")
            continue
        for each in answer["items"]:
            if each["name"] not in OWN_SETTINGS:
                values[kinds[process], each["name"]][json.dumps(each["value"])].append(process)
    problems = [
        f"{kind} {name}: {_values(users)}"
        for (kind, name), users in sorted(values.items())
        if len(users) > 1
    ]
    first = problems[0].split()[0] if problems else ""
    process = next((name for name in settings if kinds.get(name) == first), min(kinds))
    return checked(
        "settings",
        f"tidemill process settings {process} --changed",
        fine="processes of one kind have the same settings",
        problems=problems,
        unknown=unknown,
    )


def _values(users: Mapping[str, Iterable[str]]) -> str:
    return " or ".join(f"{value} ({', '.join(names)})" for value, names in users.items())


def check_answer(
    name: str, command: str, answer: Json | Unanswered, check: Callable[[Json], CheckResult]
) -> CheckResult:
    """Run a check on an answer. Without one, its result is unknown."""
    if isinstance(answer, Unanswered):
        return checked(name, command, fine="", problems=[], unknown=[answer.reason])
    return check(answer)
