"""Links to actions: a caller without the right of an action sees which right it needs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, final
from urllib.parse import unquote, urlsplit

from markupsafe import Markup
from starlette.routing import compile_path

from tidemill.admin.console.page import ROOT, Values
from tidemill.admin.http.rights import missing_right

if TYPE_CHECKING:
    from tidemill.admin.console.actions import PageAction
    from tidemill.admin.http.request_access import RequestAccess

_LINK: Final = Markup('<a{}{} href="{}">{}</a>')
_OFF: Final = Markup('<span class="off"{}>{} <small>{}</small></span>')
_LABEL: Final = Markup(' aria-label="{}"')
_BUTTON: Final = Markup(' class="button"')


@final
class ActionLinks:
    """The actions of the console by their URLs."""

    def __init__(self, actions: Iterable[PageAction]) -> None:
        self._actions = [(action, compile_path(action.path)[0]) for action in actions]

    def missing_right(self, access: RequestAccess, url: str) -> str:
        """Return the right that an action needs and its caller lacks; "": none.

        `url` is below /ui and may have a query.
        """
        path = urlsplit(url).path
        for action, pattern in self._actions:
            if found := pattern.match(path):
                values = {name: unquote(text) for name, text in found.groupdict().items()}
                return missing_right(access, f"{action.method} {action.rest}", values)
        raise LookupError(f"no action has the URL {url}")

    def of(self, access: RequestAccess) -> Values:
        """Return the functions of templates: a link to an action, and the right that one lacks."""

        def link(url: str, text: str, *, label: str = "", is_button: bool = True) -> Markup:
            needs = self.missing_right(access, url)
            shown_label = _LABEL.format(label) if label else ""
            if needs:
                return _OFF.format(shown_label, text, f"needs {needs}")
            style = _BUTTON if is_button else ""
            return _LINK.format(style, shown_label, ROOT + url, text)

        return {"action_link": link, "action_needs": partial(self.missing_right, access)}
