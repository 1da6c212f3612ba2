"""Which methods a path has: for `Allow`, and for metrics by the template of a route.

The router knows of the first route that fits a path. Two may, since a name holds any character but
a slash: `/groups/a:resetOffset` is one for GET and one for POST. Here the more specific one counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, final

from starlette.routing import compile_path


class RouteTemplate(NamedTuple):
    """A route as it is documented."""

    path: str
    pattern: re.Pattern[str]
    methods: tuple[str, ...]


@final
class RouteTemplates:
    """The templates of an application, the most specific first."""

    def __init__(self, routes: Iterable[tuple[str, Iterable[str]]]) -> None:
        """Take each route's template and methods."""
        methods: defaultdict[str, set[str]] = defaultdict(set)
        for path, served in routes:
            methods[path].update(served)
        templates = [
            RouteTemplate(path, compile_path(path)[0], tuple(sorted(served)))
            for path, served in methods.items()
        ]
        # By what is left of a template without its parameters.
        self._templates = sorted(templates, key=lambda each: -len(re.sub("{.*?}", "", each.path)))

    def find(self, path: str) -> RouteTemplate | None:
        """Return the template that a path has."""
        return next((each for each in self._templates if each.pattern.match(path)), None)
