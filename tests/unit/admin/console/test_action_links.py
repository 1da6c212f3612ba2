"""Links to actions for callers with and without the right of the action."""

from __future__ import annotations

import json
import re

import pytest

from tidemill.admin.console.action_links import ActionLinks
from tidemill.admin.console.actions import PageAction
from tidemill.admin.console.routes import ACTIONS
from tidemill.admin.http.request_access import OPEN, RequestAccess, user_access
from tidemill.admin.http.rights import FILTERED, ROWS, missing_right
from tidemill.security.acl import parse_entry
from tidemill.security.identities import User, UserType
from tidemill.security.table import Mode, SecurityTable

LINKS = ActionLinks(ACTIONS)


def access_of(*entries: tuple[str, str], is_super: bool = False) -> RequestAccess:
    kind = UserType.SUPER if is_super else UserType.NORMAL
    allowed = tuple(
        parse_entry(resource, [action], sources=[], is_allowed=True) for resource, action in entries
    )
    user = User(name="eve", id=7, type=kind, entries=allowed)
    items = {("user", "eve"): json.dumps(user.to_item()).encode()}
    known = SecurityTable(lambda kind, name: items.get((kind, name))).user("eve")
    assert known is not None
    return user_access(Mode.ON, known, address="10.0.0.1")


@pytest.mark.parametrize(
    ("url", "needs"),
    [
        ("/groups/billing/pause", "Update on Group:billing"),
        ("/groups/a%20b/reset?x=1", "Update on Group:a b"),
        ("/topics/orders/purge", "Delete on Topic:orders"),
        ("/topics/orders/set", "Create or Update on Topic:orders"),
        ("/security/users/otto/delete", "a super user"),
        ("/settings/*/log-level", "Update on Cluster:processes"),
    ],
)
def test_an_action_without_its_right_names_it(url: str, needs: str) -> None:
    link = LINKS.of(access_of())["action_link"]
    shown = link(url, "Act...")
    assert "<a " not in shown
    assert f"needs {needs}" in shown
    assert LINKS.missing_right(access_of(is_super=True), url) == ""
    assert LINKS.missing_right(OPEN, url) == ""


def test_an_action_with_its_right_is_a_link() -> None:
    link = LINKS.of(access_of(("Group:bill*", "Update")))["action_link"]
    shown = link("/groups/billing/pause", "Pause <b>...", label='"x"')
    assert shown == (
        '<a class="button" aria-label="&#34;x&#34;" href="/ui/groups/billing/pause">'
        "Pause &lt;b&gt;...</a>"
    )
    assert "<a " not in link("/groups/other/pause", "Pause...")


def test_a_user_needs_no_right_for_its_own_secret() -> None:
    call = "POST /users/{user}:rotate"
    assert missing_right(access_of(), call, {"user": "eve"}) == ""
    assert missing_right(access_of(), call, {"user": "otto"}) == "a super user"


def test_a_url_without_an_action_is_a_defect() -> None:
    with pytest.raises(LookupError):
        LINKS.missing_right(OPEN, "/groups/billing/none")


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.path)
def test_the_right_of_each_action_is_known_by_its_url(action: PageAction) -> None:
    names = re.findall(r"{(\w+)}", action.path)
    url = action.path.format(**dict.fromkeys(names, "x"))
    call = f"{action.method} {action.rest}"
    is_checked_by_route = ROWS.get(call) == FILTERED
    assert bool(LINKS.missing_right(access_of(), url)) != is_checked_by_route
