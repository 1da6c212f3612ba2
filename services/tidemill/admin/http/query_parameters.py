"""Query parameters that a call does not have, which FastAPI would pass over in silence.

Who asks for `?dry_run=true` and is not understood would have done what they only meant to look at.
What a call has is read from the OpenAPI document, which is made of the routes.
"""

from __future__ import annotations

import difflib
from typing import Any, final

from fastapi import Request
from fastapi.routing import APIRoute

from tidemill.common.errors import BadRequest

NAME_CHARS_MAX = 64  # of a parameter that is shown again; ours have fewer


@final
class KnownParameters:
    """A dependency of all routes below `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix  # which a route does not know of itself

    async def __call__(self, request: Request) -> None:
        """Raise BadRequest for a query parameter that the call does not have, or has twice."""
        if not request.query_params:
            return
        route = request.scope["route"]
        assert isinstance(route, APIRoute)
        document = request.app.openapi()
        call = document["paths"][self._prefix + route.path][request.method.lower()]
        known = [each["name"] for each in call.get("parameters", []) if each["in"] == "query"]
        for name in request.query_params:
            if name not in known:
                raise BadRequest(_reason(name, known, _body_fields_of(call, document)))
            # The last one would count.
            if len(request.query_params.getlist(name)) > 1:
                raise BadRequest(f"query parameter {name!r} is given more than once")


def _reason(name: str, known: list[str], body_fields: list[str]) -> str:
    said = f"there is no query parameter {name[:NAME_CHARS_MAX]!r} here, and nothing was done"
    if nearest := _find_nearest(name, known):
        return f"{said}; did you mean {nearest!r}?"
    if nearest := _find_nearest(name, body_fields):
        return f"{said}; {nearest!r} belongs into the body"
    return f"{said}; there are {', '.join(known)}" if known else f"{said}; this call has none"


def _find_nearest(name: str, names: list[str]) -> str | None:
    # Whoever writes dry_run or DRYRUN means dryRun.
    plain = {each.lower(): each for each in names}
    wanted = name[:NAME_CHARS_MAX].replace("_", "").replace("-", "").lower()
    found = difflib.get_close_matches(wanted, plain, n=1)
    return plain[found[0]] if found else None


def _body_fields_of(call: dict[str, Any], document: dict[str, Any]) -> list[str]:
    if "requestBody" not in call:
        return []
    reference = call["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    return list(schema["properties"])
