"""The cluster: broker groups, disks, replicas, certificates, elections, and their changes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.page import Page, PageCall, Values
from tidemill.admin.console.rendering import number_text
from tidemill.admin.http.rest_calls import CallProblem, Document

PERIOD_S: Final = 2.0  # Each rendering reads the overview.


async def load_cluster(call: PageCall) -> Values:
    """Read broker groups, replicas, disks and certificates."""
    groups = await call.api.get("/broker-groups")
    # It answers in two seconds, also while a broker group hangs.
    overview = await call.api.get("/overview")
    try:
        replicas = (await call.api.get("/replicas"))["items"]
    except CallProblem as problem:
        # Without controllers there are no replicas. Every other problem is the page's.
        if problem.status is not HTTPStatus.CONFLICT:
            raise
        replicas = []
    disks = {disk["broker"]: disk for disk in overview.get("disks", [])}
    return {
        "groups": groups["items"],
        "disks": disks,
        "replicas": replicas,
        "certificates": overview.get("certificates", []),
        "unanswered": overview.get("unanswered", []),
        "unreachable": overview.get("unreachable", []),
    }


def _group_rows(found: Document) -> Rows:
    group = found["group"]
    rows = [("State", group["state"])]
    if left := group.get("left"):
        rows += [
            ("Messages", number_text(left["messages"])),
            ("In flight", number_text(left["inFlight"])),
            ("Delayed", number_text(left["delayed"])),
        ]
    return rows


def _replicated_rows(found: Document) -> Rows:
    return [
        ("Master", number_text(found.get("master"))),
        ("Epoch", number_text(found["epoch"])),
        ("Next master", number_text(found.get("transfer"))),
        ("In sync", f"{found['inSync']} of {len(found['replicas'])}"),
    ]


PAGES: Final = (Page("/cluster", "cluster", load_cluster, period_s=PERIOD_S),)
ACTIONS: Final = (
    PageAction(
        path="/cluster/{name}/drain",
        method="POST",
        rest="/broker-groups/{name}:drain",
        title="Drain {name}",
        about="The broker group accepts no new messages. Consumers empty it.",
        back="/cluster",
        rows=_group_rows,
        button=lambda _found, path: f"Drain {path['name']}",
    ),
    PageAction(
        path="/cluster/{name}/remove",
        method="DELETE",
        rest="/broker-groups/{name}",
        title="Remove {name}",
        about="Removes a drained broker group from the cluster.",
        back="/cluster",
        fields=(Field("force", "Also with messages (lost)", FieldKind.FLAG, is_query=True),),
        rows=_group_rows,
        button=lambda _found, path: f"Remove {path['name']}",
        is_loss=True,
    ),
    PageAction(
        path="/cluster/{name}/transfer",
        method="POST",
        rest="/replicas/{name}:transfer",
        title="Move the master of {name}",
        about="Another replica becomes the master, within two seconds and without a loss.",
        back="/cluster",
        fields=(Field("target", "Replica", FieldKind.NUMBER, "Empty: any replica in sync."),),
        rows=_replicated_rows,
        button=lambda found, path: (
            f"Move the master of {path['name']} to {number_text(found.get('transfer'))}"
            if "transfer" in found
            else f"Move the master of {path['name']}"
        ),
    ),
)
