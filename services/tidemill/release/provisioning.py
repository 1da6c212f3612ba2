"""Creation of the broker groups, topics and consumer groups that the values of a release name.

A job may run again at any time. It deletes nothing: groups and topics that the values do not name
stay, with their messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.common.rest_client import Json, RestRejection
from tidemill.release.invalid_input import InvalidInput
from tidemill.release.patient_rest import PatientRestClient


class ReleaseValues(NamedTuple):
    """The broker groups, topics and consumer groups that the values of a release name."""

    broker_groups: Sequence[tuple[str, str]]  # name and address
    topics: Sequence[dict[str, Any]]
    consumer_groups: Sequence[dict[str, Any]]

    @classmethod
    def parse(cls, file: Json) -> ReleaseValues:
        """Parse the file that the chart writes. Raises InvalidInput."""
        try:
            members = [(one["name"], one["address"]) for one in file["brokerGroups"]]
            topics, consumer_groups = file.get("topics") or [], file.get("groups") or []
            # Each has a name.
            _ = [one["name"] for one in (*topics, *consumer_groups)]
        except KeyError as error:
            raise InvalidInput(f"{error} is missing") from error
        except (TypeError, AttributeError) as error:
            raise InvalidInput(
                "it is not an object with the lists brokerGroups, topics and groups"
            ) from error
        return cls(members, topics, consumer_groups)


class VolumeSpec(NamedTuple):
    """The claims of a broker group."""

    size: str  # a Kubernetes quantity, or "none": without claims
    kind: str  # storage class and access modes

    def why_not(self, wanted: VolumeSpec) -> str:
        """Return why claims of this form cannot become `wanted`, or ""."""
        from kubernetes.utils.quantity import parse_quantity

        if self.kind != wanted.kind or (self.size == "none") != (wanted.size == "none"):
            return f"its claims change from {self.size} {self.kind} to {wanted.size} {wanted.kind}"
        if self.size != "none" and parse_quantity(wanted.size) < parse_quantity(self.size):
            return f"its volumes have {self.size} and would shrink to {wanted.size}"
        return ""


def volumes_in(text: str) -> dict[str, VolumeSpec]:
    """Return the volumes in a text of `GROUP=SIZE/CLASS/MODES`, with spaces between groups.

    A group without claims has the size `none`. Raises InvalidInput.
    """
    found = {}
    for one in text.split():
        group, _, volume = one.partition("=")
        size, _, kind = volume.partition("/")
        if not group or not _is_size(size):
            raise InvalidInput(f"{one} has not the form GROUP=SIZE/CLASS/MODES or GROUP=none")
        found[group] = VolumeSpec(size, kind)
    return found


def _is_size(text: str) -> bool:
    """Return whether a text is a quantity above 0, or `none`."""
    from kubernetes.utils.quantity import parse_quantity

    if text == "none":
        return True
    try:
        return bool(parse_quantity(text) > 0)
    except ValueError:
        return False


class InstalledRelease(NamedTuple):
    """The state of the release before this job, from its ConfigMap `claims-stay`."""

    store_format: int  # the highest format that its brokers wrote; 0: unknown
    broker_groups: frozenset[str]
    replicated: frozenset[str]  # broker groups of several replicas
    volumes: dict[str, VolumeSpec]  # by broker group
    security_mode: str  # "": it had no users

    @classmethod
    def read(cls, folder: Path | None) -> InstalledRelease:
        """Read the mounted ConfigMap, which is missing before the first upgrade.

        Raises InvalidInput.
        """
        texts = {
            key: path.read_text("utf-8").strip()
            for key in ("store-format", "broker-groups", "replicated", "volumes", "security-mode")
            if folder is not None and (path := folder / key).is_file()
        }
        store_format = texts.get("store-format", "0")
        if not store_format.isdecimal():
            raise InvalidInput(f"store-format {store_format} is not a number")
        return cls(
            int(store_format),
            names_in(texts.get("broker-groups", "")),
            names_in(texts.get("replicated", "")),
            volumes_in(texts.get("volumes", "")),
            texts.get("security-mode", ""),
        )


def names_in(text: str) -> frozenset[str]:
    """Return the names in a text that separates them by commas."""
    return frozenset(filter(None, text.split(",")))


def provide(rest: PatientRestClient, values: ReleaseValues, report: Callable[[str], None]) -> None:
    """Create or update everything that the values name. Raises RestRejection, WaitTimeout."""
    listed = rest.list_items("/broker-groups", "name", "state", "address")
    known = {one["name"]: one for one in listed}
    # The home first: a single broker group accepts others only when it is a member itself.
    members = sorted(
        values.broker_groups, key=lambda one: not known.get(one[0], {}).get("isHome", False)
    )
    for name, address in members:
        report(_add(rest, name, address, known))
    rest.wait_until(lambda: _why_not_reachable(rest, values))
    for kind, items in (("topics", values.topics), ("groups", values.consumer_groups)):
        for item in items:
            settings = {key: value for key, value in item.items() if key != "name"}
            rest.call("PUT", f"/{kind}", item["name"], body=settings)
            report(f"{kind.removesuffix('s')} {item['name']}")


def _add(rest: PatientRestClient, name: str, address: str, known: dict[str, Json]) -> str:
    """Add a broker group unless it is a member; return its state in words."""
    member = known.get(name)
    if member is not None and member["state"] == "draining":
        return f"broker group {name} is draining and stays in this state"
    # A single broker group may not be its own home yet. The list does not show this, and a second
    # PUT does no harm.
    if member is not None and member["address"] == address and len(known) > 1:
        return f"broker group {name} is a member"
    rest.wait_until(lambda: _why_not_added(rest, name, address))
    return f"broker group {name} is a member at {address}"


def _why_not_added(rest: PatientRestClient, name: str, address: str) -> str:
    try:
        rest.call("PUT", "/broker-groups", name, body={"address": address})
    except RestRejection as error:
        if error.status != HTTPStatus.CONFLICT:
            raise
        return str(error)  # Its broker starts, perhaps.
    return ""


def _why_not_reachable(rest: PatientRestClient, values: ReleaseValues) -> str:
    known = {one["name"]: one for one in rest.list_items("/broker-groups", "name", "reachable")}
    missing = [
        f"{name} ({known[name].get('reason', 'unreachable') if name in known else 'not a member'})"
        for name, _ in values.broker_groups
        if name not in known or not known[name]["reachable"] or "reason" in known[name]
    ]
    return f"waiting for {', '.join(missing)}" if missing else ""


def _counts(backlog: Json) -> str:
    counts = {
        "messages": backlog["messages"],
        "in flight": backlog["inFlight"],
        "delayed": backlog["delayed"],
    }
    others = {"half messages": backlog.get("halfMessages"), "dedup keys": backlog.get("dedupKeys")}
    counts |= {name: count for name, count in others.items() if count}
    return ", ".join([f"{count} {name}" for name, count in counts.items()])


def find_members_to_remove(items: Json, named: Sequence[str]) -> Iterator[str]:
    """Yield the remedy for each member that the values no longer name."""
    for one in items:
        if one["name"] in named:
            continue
        if one["isHome"]:
            yield (
                f"{one['name']} is the home of topics, consumer groups and broker groups, and"
                f" cannot be removed; put it back into brokerGroups"
            )
            continue
        backlog = one.get("left")
        state = (
            f"backlog: {_counts(backlog)}"
            if backlog
            else "it is not draining"
            if one["state"] == "active"
            else "its backlog is unknown"
        )
        yield (
            f"{one['name']} is still a member ({state}); put it back into brokerGroups, run"
            f" `tidemill broker-group drain {one['name']} --wait` and `tidemill broker-group remove"
            f" {one['name']}`, then take it out of brokerGroups"
        )
