"""`tidemill quota set`: a limit of 0, and the limits that a command does not name."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE

FIELDS = (
    "publishMessagesPerS",
    "publishBytesPerS",
    "dispatchMessagesPerS",
    "dispatchBytesPerS",
    "storedBytes",
    "pendingTimers",
)


class Quotas:
    """The REST API with at most one quota."""

    def __init__(self, **limits: int) -> None:
        self.limits = limits
        self.versions: list[int] = []  # that the changes expected
        self.is_of_deleted_user = False

    def answer(self, request: ApiRequest) -> ApiAnswer:
        """Answer a request."""
        _, _, kind, subject = request.path.split("/")
        if request.method == "GET" and not self.limits:
            return refusal("there is no quota", 404)
        if request.method == "PUT":
            self.versions.append(request.body.pop("ifVersion"))
            self.limits = {field: limit for field, limit in request.body.items() if limit}
        found: dict[str, Any] = dict.fromkeys(FIELDS, 0) | self.limits
        found |= {"kind": kind, "subject": subject, "ofDeletedUser": self.is_of_deleted_user}
        return ApiAnswer({**found, "version": 4})


def set_quota(quotas: Quotas, *arguments: str) -> Result:
    with scripted_api(quotas.answer) as address:
        return CliRunner().invoke(app, ["--admin", address, "quota", "set", *arguments])


def test_names_of_a_list_are_options_of_the_other_commands() -> None:
    subjects = [("topic", "orders"), ("prefix", "shop%"), ("client", "10.0.0.1@7")]
    rows = [
        {**dict.fromkeys(FIELDS, 5), "kind": kind, "subject": subject, "ofDeletedUser": False}
        for kind, subject in subjects
    ]
    deleted: list[str] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        if request.method == "GET":
            return ApiAnswer({"quotas": rows})
        deleted.append(request.path)
        return ApiAnswer({"quota": rows[len(deleted) - 1]})

    with scripted_api(answer) as address:

        def run(*arguments: str) -> Result:
            return CliRunner().invoke(app, ["--admin", address, *arguments])

        names = run("-o", "name", "quota", "list").stdout.splitlines()
        assert names == ["--topic=orders", "--prefix=shop%", "--client=10.0.0.1@7"]
        for name in names:
            assert run("quota", "delete", name).exit_code == 0
    assert len(deleted) == len(subjects)


def test_limits_that_are_not_named_stay() -> None:
    quotas = Quotas()
    for arguments in (["--messages=1000", "--bytes=5000"], ["--stored-bytes=1KiB"]):
        assert set_quota(quotas, "--topic=orders", *arguments).exit_code == 0
    assert quotas.limits == {
        "publishMessagesPerS": 1_000,
        "publishBytesPerS": 5_000,
        "storedBytes": 1_024,
    }
    assert quotas.versions == [0, 4]
    shown = set_quota(quotas, "--topic=orders", "--no-bytes", "--messages=7")
    assert "messages/s 7, bytes/s no limit, stored bytes 1KiB" in shown.output
    assert quotas.limits == {"publishMessagesPerS": 7, "storedBytes": 1_024}


def test_limits_of_a_consumer_group_stay() -> None:
    quotas = Quotas(dispatchBytesPerS=5)
    assert set_quota(quotas, "--group=billing", "--messages=7").exit_code == 0
    assert quotas.limits == {"dispatchMessagesPerS": 7, "dispatchBytesPerS": 5}


def test_a_later_user_of_a_name_inherits_no_limits() -> None:
    quotas = Quotas(publishBytesPerS=5)
    quotas.is_of_deleted_user = True
    assert set_quota(quotas, "--user=shop", "--messages=7").exit_code == 0
    assert quotas.limits == {"publishMessagesPerS": 7}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--messages=0"],
        ["--bytes=0"],
        ["--pending-timers=0"],
        ["--stored-bytes=0B"],
        ["--messages=1", "--no-messages"],
    ],
)
def test_no_limit_and_a_limit_of_zero_are_wrong_usage(arguments: list[str]) -> None:
    quotas = Quotas(publishMessagesPerS=1)
    assert set_quota(quotas, "--topic=orders", *arguments).exit_code == EXIT_USAGE
    assert quotas.limits == {"publishMessagesPerS": 1}


def test_the_last_limit_is_removed_by_a_deletion() -> None:
    refused = set_quota(Quotas(publishMessagesPerS=1), "--topic=orders", "--no-messages")
    assert refused.exit_code == EXIT_REFUSED
    assert "tidemill quota delete" in refused.output
