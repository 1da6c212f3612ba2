"""Each command calls operations of the REST API (O-1), and each change has a dry run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.cli.processes import PROCESSES

OPENAPI: Final = Path(__file__).parents[3] / "docs" / "openapi.json"
METHODS: Final = {"get", "put", "post", "delete"}
# Commands without the REST API: on files of this machine, or of the chart and of Spark.
LOCAL: Final = {"completion", "context", "store", "filter", "release", "pipeline", *PROCESSES}
SINGLE: Final = {"doctor", "top", "support-bundle"}  # commands without a noun, and no changes
# Command with its arguments -> the operations that it calls, the first one first.
OPERATIONS: Final = {
    "doctor": "getSession listProcesses listBrokerGroups listReplicas getStorage listGroups"
    " summarizeDeadLetters listProcessSettings",
    "top --once": "listGroups listTopics",
    "topic list": "listTopics",
    "topic create t": "getTopic putTopic",
    "topic set t --queues 4": "getTopic putTopic",
    "topic show t": "getTopic getDedup",
    "topic delete t": "deleteTopic",
    "topic purge t": "purgeTopic",
    "topic spread t": "spreadTopic",
    "group list": "listGroups",
    "group create g": "getGroup putGroup",
    "group set g --max-attempts 4": "getGroup putGroup",
    "group show g": "getGroup getProgress getClients diagnoseGroup",
    "group show g --scaling": "getScaling",
    "group pause g": "pauseGroup",
    "group resume g": "resumeGroup",
    "group unlock g --topic t --queue 1": "releaseLock",
    "group reset g --topic t --to latest": "resetOffset",
    "group delete g": "deleteGroup",
    "pull-offset list g": "getProgress",
    "pull-offset delete g --topic t": "forgetPullOffsets",
    "delivery list g": "listDeliveries",
    "delivery release g --all": "releaseDeliveries",
    "message send t body": "sendMessage",
    "message show t id": "peekMessage",
    "message trace id": "traceMessage",
    "message find t --key k": "findMessages",
    "message peek t": "getTopic readMessages",
    "message verify t id --client c": "verifyMessage",
    "message tail t": "getTopic readMessages",
    "timer list": "listTimers",
    "timer histogram": "getTimerHistogram",
    "timer show 1": "getTimer",
    "timer cancel 1": "cancelTimer",
    "timer reschedule 1 --delay 1h": "rescheduleTimer",
    "timer fire 1": "fireTimer",
    "transaction list": "listTransactions",
    "transaction show id": "getTransaction",
    "transaction commit id": "commitTransaction",
    "transaction rollback id": "rollBackTransaction",
    "transaction check id": "checkTransaction",
    "transaction recover id": "recoverTransaction",
    "transaction recover --topic t": "recoverTransactions",
    "dead-letter list": "listDeadLetters",
    "dead-letter summary": "summarizeDeadLetters",
    "dead-letter show g b:1": "getDeadLetter",
    "dead-letter replay g b:1": "replayDeadLetters",
    "dead-letter discard g b:1": "discardDeadLetters",
    "dead-letter copy g b:1": "copyDeadLetter",
    "operation list": "listOperations",
    "operation show b:1": "getOperation",
    "operation wait b:1": "getOperation",
    "operation cancel b:1": "cancelOperation",
    "definitions export": "getDefinitions",
    "definitions apply FILE": "applyDefinitions getOperation",
    "definitions convert FILE --from rabbitmq": "convertDefinitions",
    "support-bundle": "makeSupportBundle getOperation getSupportBundle",
    "dedup-key show t k": "getDedupKey",
    "dedup-key delete t k": "deleteDedupKey",
    "client list": "getClients",
    "client show c": "getClient",
    "client stack c": "printStack",
    "client kick c": "kick",
    "broker-group list": "listBrokerGroups",
    "broker-group show b": "getBrokerGroup",
    "broker-group set b --min-in-sync 2": "setMinInSync",
    "broker-group add b 10.0.0.1:10911": "addBrokerGroup",
    "broker-group drain b": "drainBrokerGroup",
    "broker-group undrain b": "getBrokerGroup addBrokerGroup",
    "broker-group remove b": "removeBrokerGroup",
    "broker-group remove b --record-only": "forgetReplicas",
    "broker-group transfer b": "transferMaster",
    "broker-group transfer b --unclean --to 1 --reason r": "replaceMaster",
    "broker-group history": "listReplicas",
    "replica list": "listReplicas",
    "replica show b-1": "getReplicas",
    "replica drain b-1": "drainReplica",
    "replica undrain b-1": "drainReplica",
    "cluster show": "getOverview getSession",
    "process list": "listProcesses",
    "process show p": "getProcess",
    "process settings p": "listProcessSettings",
    "process set-log-level p debug": "setLogLevel",
    "process slow-calls": "listSlowCalls",
    "storage show": "getStorage",
    "security enable": "getSecurity getSession putUser putSecurity",
    "security rotate-key": "addKey listKeys encryptSecrets",
    "security import FILE": "listUsers listRoles putRole putUser",
    "security disable": "getSecurity putSecurity",
    "security status": "getSecurity listAudit",
    "user list": "listUsers",
    "user show u": "getUser",
    "user create u": "getUser putUser",
    "user set u --type super": "getUser putUser",
    "user enable u": "getUser putUser",
    "user disable u": "getUser putUser",
    "user rotate u": "rotateUser",
    "user delete u": "deleteUser",
    "token list": "listTokens",
    "token create n --no-expiry": "createToken",
    "token delete n": "listTokens deleteToken",
    "role list": "listRoles",
    "role show r": "getRole",
    "role create r": "getRole putRole",
    "role set r --producer t": "getRole putRole",
    "role delete r": "deleteRole",
    "acl list u": "getUser",
    "acl allow u Topic:t Pub": "getUser putUser",
    "acl deny u Topic:t Pub": "getUser putUser",
    "acl revoke u Topic:t Pub": "getUser putUser",
    "acl check --user u --action Pub --topic t": "checkAccess",
    "ban list": "listBans",
    "ban create --client c": "getClient createBan",
    "ban delete --client c": "deleteBan",
    "quota list": "listQuotas",
    "quota set --user u --messages 4": "getQuota putQuota",
    "quota delete --user u": "deleteQuota",
    "audit list": "listAudit",
    "bench send --for 1s": "putTopic deleteTopic",
    "bench receive --for 1s": "putTopic deleteTopic",
    "bench delay --for 1s": "putTopic deleteTopic",
}
# Changes without --dry-run: sends (O-2), loads, and contexts, which are files of this user.
WITHOUT_DRY_RUN: Final = {
    *("message send", "message verify", "store copy"),
    *("bench send", "bench receive", "bench delay"),
    *(f"context {verb}" for verb in ("create", "set", "use", "delete")),
}
READING: Final = {
    *("list", "show", "summary", "history", "settings", "status", "slow-calls", "check"),
    *("trace", "find", "peek", "tail", "wait", "stack", "histogram", "export", "convert"),
}


def commands() -> Iterator[tuple[str, Any]]:
    """Yield the name of each command, with the command."""
    root: Any = typer.main.get_command(app)
    for noun, command in root.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            for verb, below in command.commands.items():
                yield f"{noun} {verb}", below
        else:
            yield noun, command


def operations() -> dict[str, re.Pattern[str]]:
    """Return the method and path of each operation, by its id."""
    found = {}
    for path, methods in json.loads(OPENAPI.read_text("utf-8"))["paths"].items():
        pattern = re.sub(r"\\{[^}]+\\}", "[^/:]+", re.escape(path.removeprefix("/api/v1")))
        for method in METHODS & methods.keys():
            id_ = methods[method]["operationId"]
            found[id_] = re.compile(f"{method.upper()} {pattern}")
    return found


def names(line: str) -> str:
    """Return noun and verb of a line."""
    words = line.split()[:2]
    return words[0] if words[0] in SINGLE else " ".join(words)


def test_each_command_has_its_operations() -> None:
    wanted = {name for name, _ in commands() if name.split()[0] not in LOCAL}
    assert {names(line) for line in OPERATIONS} == wanted


def test_each_operation_exists() -> None:
    known = operations().keys()
    assert {each for line in OPERATIONS.values() for each in line.split()} <= known


@pytest.mark.parametrize("line", OPERATIONS)
def test_a_command_calls_its_operation(tmp_path: Path, line: str) -> None:
    """The API refuses the first call of each command, so no answer needs its shape."""
    called = []

    def refuse(request: ApiRequest) -> ApiAnswer:
        called.append(f"{request.method} {request.path.partition('?')[0]}")
        return ApiAnswer({"title": "Teapot", "detail": "no call is answered"}, 418)

    file = tmp_path / "plain_acl.yml"
    file.touch(0o600)
    file.write_text("accounts:\n- {accessKey: user, secretKey: a-secret-of-16-bytes}\n")
    words = [str(file) if word == "FILE" else word for word in line.split()]
    root: Any = dict(commands())
    if any("--yes" in each.opts for each in root[names(line)].params):
        words.append("--yes")
    with scripted_api(refuse) as address:
        ended = CliRunner().invoke(app, ["--admin", address, *words])
    assert ended.exit_code == 1, ended.output
    first = operations()[OPERATIONS[line].split()[0]]
    assert first.fullmatch(called[0]), called


def test_each_change_has_a_dry_run() -> None:
    changes = {
        name: command
        for name, command in commands()
        if name.partition(" ")[0] not in LOCAL - {"context", "store"} | SINGLE
        and name.rpartition(" ")[2] not in READING
    }
    without = {
        name
        for name, command in changes.items()
        if not any("--dry-run" in each.opts for each in command.params)
    }
    assert without == WITHOUT_DRY_RUN
