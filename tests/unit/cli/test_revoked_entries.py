"""`tidemill acl revoke` of an entry that allows, beside one that denies."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_USAGE


def entry(decision: str) -> dict[str, Any]:
    return {"resource": "Topic:orders", "actions": ["Pub"], "sources": [], "decision": decision}


class User:
    """The REST API with the user `orders`."""

    def __init__(self, *decisions: str) -> None:
        self.entries = [entry(decision) for decision in decisions]

    def answer(self, request: ApiRequest) -> ApiAnswer:
        """Answer a request."""
        if request.method == "PUT":
            self.entries = request.body["entries"]
        return ApiAnswer({"entries": self.entries, "version": 7})

    def revoke(self, *options: str) -> Result:
        """Revoke Pub on Topic:orders."""
        with scripted_api(self.answer) as address:
            line = ["--admin", address, "acl", "revoke", "orders", "Topic:orders", "Pub", *options]
            return CliRunner().invoke(app, line)


def test_an_entry_that_denies_stays_without_its_decision() -> None:
    user = User("ALLOW", "DENY")
    refused = user.revoke()
    assert refused.exit_code == EXIT_USAGE
    assert "add --decision" in refused.output
    assert user.entries == [entry("ALLOW"), entry("DENY")]


@pytest.mark.parametrize(("decision", "kept"), [("allow", "DENY"), ("DENY", "ALLOW")])
def test_a_decision_chooses_the_entry(decision: str, kept: str) -> None:
    user = User("ALLOW", "DENY")
    assert user.revoke("--decision", decision).exit_code == 0
    assert user.entries == [entry(kept)]
    assert user.revoke("--decision", decision).exit_code == EXIT_USAGE, "there is none any more"


def test_the_answer_names_the_removed_entry() -> None:
    shown = User("DENY").revoke()
    assert shown.output.strip() == "orders has 0 entries, without DENY Topic:orders"
