"""The runbooks of the documentation, which problems and alerts name."""

from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from tidemill.admin.console.page import ROOT, Page, PageCall, Values
from tidemill.admin.http.rest_calls import CallProblem

if TYPE_CHECKING:
    from markdown_it.token import Token

FOLDER: Final = Path(__file__).parents[1] / "runbooks"  # a link to docs/runbooks
NAME: Final = re.compile("[A-Za-z]{1,64}")
_OWN_LINK: Final = re.compile(r"([A-Za-z]+)\.md")


async def load_runbook(call: PageCall) -> Values:
    """Read a runbook. Raises CallProblem if there is none of this name."""
    name = call.path["name"]
    path = FOLDER / f"{name}.md"
    if not NAME.fullmatch(name) or not path.is_file():
        raise CallProblem(HTTPStatus.NOT_FOUND, "Not Found", f"there is no runbook {name!r}")
    return {"name": name, "text": html_of(path.read_text(encoding="utf-8"))}


async def load_runbooks(_call: PageCall) -> Values:
    """Read the names of all runbooks."""
    return {"names": sorted(path.stem for path in FOLDER.glob("*.md"))}


def html_of(text: str) -> Markup:
    """Return a text in Markdown as HTML, without its title. HTML in the text stays text.

    Links to other runbooks lead to their pages. The console has no other page of the documentation,
    so other links become their text.
    """
    # Imported late: most admin processes never show a runbook.
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.renderer.rules.update(  # type: ignore[attr-defined]  # of the HTML renderer
        fence=_code, table_open=_table_begin, table_close=_table_end
    )
    tokens = parser.parse(text)
    if tokens and tokens[0].type == "heading_open" and tokens[0].tag == "h1":
        tokens = tokens[3:]
    for token in tokens:
        token.children = _with_own_links(token.children or [])
    escaped = parser.renderer.render(tokens, parser.options, {})
    return Markup(escaped)  # noqa: S704  # nosec B704  # The renderer has escaped the text.


def _with_own_links(tokens: list[Token]) -> list[Token]:
    """Return the parts of a line, with links to runbooks only."""
    kept: list[Token] = []
    is_kept = True
    for token in tokens:
        if token.type == "link_open":
            own = _OWN_LINK.fullmatch(str(token.attrGet("href")))
            is_kept = own is not None
            if own is not None:
                token.attrSet("href", f"{ROOT}/runbooks/{own[1]}")
        if is_kept or token.type not in {"link_open", "link_close"}:
            kept.append(token)
        if token.type == "link_close":
            is_kept = True
    return kept


# A part that scrolls sideways takes the focus, so that the keyboard can scroll it.
def _code(tokens: list[Token], at: int, *_: Any) -> str:
    return f'<pre tabindex="0"><code>{escape(tokens[at].content)}</code></pre>\n'


def _table_begin(*_: Any) -> str:
    return '<div class="wide" tabindex="0" role="group" aria-label="Table">\n<table>\n'


def _table_end(*_: Any) -> str:
    return "</table>\n</div>\n"


PAGES: Final = (
    Page("/runbooks", "runbooks", load_runbooks, is_live=False),
    Page("/runbooks/{name}", "runbook", load_runbook, is_live=False),
)
