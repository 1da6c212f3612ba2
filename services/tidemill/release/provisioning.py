"""What a release's values say that there shall be: broker groups, topics and consumer groups.

All of it may be said again at any time. What is there and is not named stays: messages are not
deleted by a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.release.rest import Json, Rest


class Wanted(NamedTuple):
    """What there shall be, as the chart writes it."""

    broker_groups: Sequence[tuple[str, str]]  # name and address
    topics: Sequence[dict[str, Any]]
    groups: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, file: Json) -> Wanted:
        """Read what the chart has written."""
        members = [(one["name"], one["address"]) for one in file["brokerGroups"]]
        return cls(members, file.get("topics") or [], file.get("groups") or [])


class Installed(NamedTuple):
    """What the release says of itself, in its ConfigMap `claims-stay`."""

    store_format: int  # the highest that its brokers have had; 0 where nobody says it
    broker_groups: frozenset[str]

    @classmethod
    def read(cls, folder: Path | None) -> Installed:
        """Read the ConfigMap as a volume shows it; there is none before the first upgrade."""
        texts = {
            key: path.read_text("utf-8").strip()
            for key in ("store-format", "broker-groups")
            if folder is not None and (path := folder / key).is_file()
        }
        groups = texts.get("broker-groups", "").split(",")
        return cls(int(texts.get("store-format", "0")), frozenset(filter(None, groups)))


def provide(rest: Rest, wanted: Wanted, say: Callable[[str], None]) -> None:
    """Add and put what is wanted; raises Refused and Unreachable."""
    known = {one["name"]: one for one in rest.call("GET", "/broker-groups")["items"]}
    # The home first: one that is alone takes others only when it is a member itself.
    members = sorted(
        wanted.broker_groups, key=lambda one: not known.get(one[0], {}).get("isHome", False)
    )
    for name, address in members:
        say(_add(rest, name, address, known))
    rest.wait_until(lambda: _missing(rest, wanted))
    for kind, items in (("topics", wanted.topics), ("groups", wanted.groups)):
        for item in items:
            settings = {key: value for key, value in item.items() if key != "name"}
            rest.call("PUT", f"/{kind}", item["name"], body=settings)
            say(f"{kind.removesuffix('s')} {item['name']}")


def _add(rest: Rest, name: str, address: str, known: dict[str, Json]) -> str:
    """Add a broker group that is not there, and say what is."""
    found = known.get(name)
    if found is not None and found["state"] == "draining":
        return f"broker group {name} is draining, and stays so"
    # The only one may not be its own home yet, which the list does not tell; asking twice is
    # harmless.
    if found is not None and found["address"] == address and len(known) > 1:
        return f"broker group {name} is a member"
    rest.call("PUT", "/broker-groups", name, body={"address": address})
    return f"broker group {name} is a member at {address}"


def _missing(rest: Rest, wanted: Wanted) -> str:
    shown = {one["name"]: one for one in rest.call("GET", "/broker-groups")["items"]}
    away = [
        f"{name} ({shown[name].get('reason', 'not reachable') if name in shown else 'no member'})"
        for name, _ in wanted.broker_groups
        if name not in shown or not shown[name]["reachable"] or "reason" in shown[name]
    ]
    return f"waiting for {', '.join(away)}" if away else ""


def leaving(items: Json, kept: Sequence[str]) -> Iterator[str]:
    """Yield, of each member that is in no values any more, what is to be done about it."""
    for one in items:
        if one["name"] in kept:
            continue
        if one["isHome"]:
            yield (
                f"{one['name']} is the home of topics, consumer groups and broker groups: it stays;"
                f" put it back into brokerGroups"
            )
            continue
        left = one.get("left")
        rest = (
            f"left there: {left['messages']} messages, {left['inFlight']} in flight,"
            f" {left['delayed']} delayed"
            if left
            else "it is not draining"
            if one["state"] == "active"
            else "nobody knows what is left"
        )
        yield (
            f"{one['name']} is a member still ({rest}): put it back into brokerGroups, run"
            f" `tidemill broker-group drain {one['name']} --wait` and `tidemill broker-group remove"
            f" {one['name']}`, and take it out then"
        )
