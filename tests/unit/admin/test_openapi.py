"""The OpenAPI document describes all of its parts."""

from __future__ import annotations

from typing import Any

from tidemill.admin.app import create_app

# Operations other than reads without a dry run, and the reason.
WITHOUT_DRY_RUN = {
    "beginSession": "it is a login, and changes nothing of the cluster",
    "endSession": "it is a logout, and changes nothing of the cluster",
    "sendMessage": "it is a send",
    "sendMessages": "it is a send",
    "checkAccess": "it is a question",
    "convertDefinitions": "it returns a file, and changes nothing",
    "printStack": "it asks a client, and changes nothing",
    "verifyMessage": "it asks a client to handle a message, which it does not deliver",
    "makeSupportBundle": "it collects what its caller may read, and changes nothing",
}


def document() -> dict[str, Any]:
    return create_app(None, None).openapi()  # type: ignore[arg-type]  # No request is served.


def test_every_field_has_a_description() -> None:
    schemas = document()["components"]["schemas"]
    ours = {name: each for name, each in schemas.items() if "Validation" not in name}
    silent = [
        f"{name}.{field}"
        for name, each in ours.items()
        for field, property_ in each.get("properties", {}).items()
        if not property_.get("description")
    ]
    assert not silent
    assert not [name for name, each in ours.items() if not each.get("description")]


def test_every_parameter_and_call_has_a_description() -> None:
    silent = []
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            silent += [
                f"{method} {path} {each['name']}"
                for each in operation.get("parameters", [])
                if not each.get("description")
            ]
            silent += [] if operation.get("description") else [f"{method} {path}"]
    assert not silent


def test_operations_have_stable_unique_names() -> None:
    names = [
        operation["operationId"]
        for operations in document()["paths"].values()
        for operation in operations.values()
    ]
    assert len(set(names)) == len(names)
    assert {"putTopic", "putGroup", "listTimers"} <= set(names)


def test_errors_are_documented_as_problems() -> None:
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"]["default"]["content"]
            assert list(content) == ["application/problem+json"], f"{method} {path}"


def test_every_changing_operation_has_a_dry_run() -> None:
    lacking = {
        operation["operationId"]
        for operations in document()["paths"].values()
        for method, operation in operations.items()
        if method != "get"
        and "dryRun" not in {each["name"] for each in operation.get("parameters", [])}
    }
    assert lacking == WITHOUT_DRY_RUN.keys()


def test_an_action_needs_a_body_only_if_a_field_has_no_default() -> None:
    schemas = document()["components"]["schemas"]
    for path, operations in document()["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        if not name or not operations["post"]["requestBody"].get("required"):
            continue
        body = schemas[name.rpartition("/")[2]]
        has_no_default = "required" in body or "not" in body
        assert has_no_default or "Definitions" in name, path  # An empty file would be a mistake.
