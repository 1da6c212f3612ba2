"""Rejection of unknown query parameters, which FastAPI ignores.

Otherwise a misspelt `?dry_run=true` would apply a change. The OpenAPI document, which is generated
from the routes, has the known parameters of each call.
"""

from __future__ import annotations

from typing import Any, Final, final

from fastapi import Request
from fastapi.routing import APIRoute

from tidemill.admin.http.nearest import nearest_field, unknown_text
from tidemill.common.errors import BadRequest

JSON: Final = "application/json"
PARAMETER: Final = "query parameter"


@final
class KnownParameters:
    """A check of the query parameters, for all routes below `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix  # the path of a route does not include it

    async def __call__(self, request: Request) -> None:
        """Raise BadRequest for an unknown or repeated query parameter."""
        if not request.query_params:
            return
        route = request.scope["route"]
        assert isinstance(route, APIRoute)
        document = request.app.openapi()
        call = document["paths"][self._prefix + route.path_format][request.method.lower()]
        known = [each["name"] for each in call.get("parameters", []) if each["in"] == "query"]
        for name in request.query_params:
            if name not in known:
                raise BadRequest(_reason(name, known, _body_fields_of(call, document)))
            # FastAPI would use the last value.
            if len(request.query_params.getlist(name)) > 1:
                raise BadRequest(f"query parameter {name!r} is given more than once; give it once")


def _reason(name: str, known: list[str], body_fields: list[str]) -> str:
    if nearest_field(name, known) is None and (near := nearest_field(name, body_fields)):
        return f"{unknown_text(PARAMETER, name, ())}; {near!r} belongs in the body"
    if known:
        return unknown_text(PARAMETER, name, known)
    return f"{unknown_text(PARAMETER, name, ())}; this call has no query parameters"


def _body_fields_of(call: dict[str, Any], document: dict[str, Any]) -> list[str]:
    content = call.get("requestBody", {}).get("content", {})
    if JSON not in content:
        return []
    schema = content[JSON]["schema"]
    schemas = document["components"]["schemas"]
    # A body of several forms has the fields of all of them.
    forms = schema.get("anyOf", [schema])
    names = [each["$ref"].rpartition("/")[2] for each in forms if "$ref" in each]
    return list(dict.fromkeys(field for name in names for field in schemas[name]["properties"]))
