"""The methods of each path: for their check, the header `Allow`, and metrics by route.

The router uses the first route that matches a path. Several can match, since a name may contain any
character except a slash: `/groups/a:resetOffset` matches two routes. Here the most specific one
counts. The subject of a quota may contain slashes, too, because it may be the id of a client.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final, NamedTuple, final

from fastapi import HTTPException, Request
from starlette.routing import compile_path

PREFIX: Final = "/api/v1"


class RouteTemplate(NamedTuple):
    """A documented path with its methods."""

    path: str
    pattern: re.Pattern[str]
    methods: tuple[str, ...]


@final
class RouteTemplates:
    """The templates of an application, the most specific first."""

    def __init__(self, routes: Iterable[tuple[str, Iterable[str]]]) -> None:
        """Group the methods of all routes by template."""
        methods: defaultdict[str, set[str]] = defaultdict(set)
        for path, served in routes:
            methods[path].update(served)
        templates = []
        for path, served in methods.items():
            pattern, documented, _ = compile_path(path)  # {subject:path} is documented as {subject}
            templates.append(RouteTemplate(documented, pattern, tuple(sorted(served))))
        # The longer the fixed part, the more specific the template.
        self._templates = sorted(templates, key=lambda each: -len(re.sub("{.*?}", "", each.path)))

    def find(self, path: str) -> RouteTemplate | None:
        """Return the most specific template of a path; None for an unknown path."""
        return next((each for each in self._templates if each.pattern.match(path)), None)


async def check_method(request: Request) -> None:
    """Answer 405 unless the most specific template of the path has the method.

    The router takes `GET /timers/7:cancel` for a timer with a strange id.
    """
    # request.url drops tabs and line feeds.
    template = request.app.state.paths.find(request.scope["path"])
    assert template is not None, "the router found the path"
    if request.method not in template.methods:
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED)
