"""Anonymous support bundles: names become hashes, and documents stay valid."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tarfile
from typing import Any

import pytest

from tidemill.admin.cluster.support_bundles import BundledFile, bundle_of

PROCESSES = {"items": [{"name": "proxy-0", "kind": "proxy"}]}


def anonymous(**files: Any) -> dict[str, Any]:
    """Return documents and log lines by the names of their files; `_log` is the end of a log."""
    given = [BundledFile("processes.json", json.dumps(PROCESSES))]
    for name, content in files.items():
        if name.endswith("_log"):
            lines = "".join(f"{line}\n" for line in content)
            given.append(BundledFile(f"logs/{name.removesuffix('_log')}.log", lines))
        else:
            given.append(BundledFile(f"{name}.json", json.dumps(content)))
    content = asyncio.run(bundle_of(given, is_anonymous=True))
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        texts = {
            entry.name.rpartition("/")[2]: file.read().decode()
            for entry in archive
            if (file := archive.extractfile(entry)) is not None
        }
    return {
        name: json.loads(text)
        if name.endswith(".json")
        else [json.loads(line) for line in text.splitlines()]
        for name, text in texts.items()
    }


def test_names_in_fields_become_equal_hashes_in_all_files() -> None:
    shown = anonymous(
        topics={"topics": [{"name": "acme", "messageType": "FIFO"}, {"name": "%DLQ%acme"}]},
        audit={"records": [{"resource": "Topic:acme", "user": "eve", "claimedUser": "mallory"}]},
        proxy_log=[json.dumps({"event": "topic deleted", "topic": "acme", "took_ms": 5})],
    )
    topic, dead_letters = shown["topics.json"]["topics"]
    assert topic["name"].startswith("hidden-")
    assert topic["messageType"] == "FIFO"
    assert dead_letters["name"] == f"%DLQ%{topic['name']}"
    [record] = shown["audit.json"]["records"]
    assert record["resource"] == f"Topic:{topic['name']}"
    [line] = shown["proxy.log"]
    assert line == {"event": "topic deleted", "topic": topic["name"], "took_ms": 5}
    assert not {"eve", "mallory"} & set(record.values())


def test_names_of_fields_processes_and_values_stay() -> None:
    names = ["true", "1", "name", "topics", "proxy-0"]
    shown = anonymous(
        topics={"topics": [{"name": name, "isSystem": True, "queues": 1} for name in names]},
        proxy_log=[json.dumps({"event": "started", "process": "proxy-0", "name": "proxy-0"})],
    )
    rows = shown["topics.json"]["topics"]
    assert all(row["name"].startswith("hidden-") for row in rows)
    assert all((row["isSystem"], row["queues"]) == (True, 1) for row in rows)
    assert shown["processes.json"] == PROCESSES
    assert shown["proxy.log"] == [{"event": "started", "process": "proxy-0", "name": "proxy-0"}]


def test_patterns_quotas_and_identities_have_no_names() -> None:
    shown = anonymous(
        definitions={
            "users": [
                {
                    "name": "eve",
                    "entries": [
                        {"resource": "Topic:acme-*", "sources": ["10.1.2.3/32"]},
                        {"resource": "Topic:*"},
                        {"resource": "Cluster:audit"},
                    ],
                    "serviceAccounts": ["acme-ns/acme-sa"],
                    "certificates": ["CN=acme-cert"],
                }
            ],
            "quotas": [{"kind": "client", "subject": "acme-client", "storedBytes": 7}],
        },
        audit={"records": [{"resource": "Quota:client:acme-client", "reason": "for acme-corp"}]},
        operations={
            "operations": [
                {"by": "eve at 10.1.2.3", "errors": [{"id": "acme-id", "outcome": "no acme-sa."}]}
            ]
        },
        proxy_log=[json.dumps({"event": "changed", "items": ["deleteUser acme-gone"]})],
    )
    assert "acme" not in json.dumps(shown)
    assert "10.1.2.3" not in json.dumps(shown)
    [user] = shown["definitions.json"]["users"]
    prefix, everything, area = (entry["resource"] for entry in user["entries"])
    assert prefix.startswith("Topic:hidden-")
    assert prefix.endswith("*")
    assert (everything, area) == ("Topic:*", "Cluster:audit")
    assert user["entries"][0]["sources"][0].endswith("/32")
    [quota] = shown["definitions.json"]["quotas"]
    [record] = shown["audit.json"]["records"]
    assert record == {"resource": f"Quota:client:{quota['subject']}", "reason": "hidden"}
    [operation] = shown["operations.json"]["operations"]
    assert operation["by"].startswith(f"{user['name']} at hidden-")


def test_other_texts_lose_the_names_of_later_files() -> None:
    shown = anonymous(
        overview={"problems": [{"text": "the topic acme. The group acme-billing, at 10.1.2.3: x"}]},
        topics={"topics": [{"name": "acme"}]},
        proxy_log=[json.dumps({"event": "e", "group": "acme-billing"}), '{"cut": "acme-b', "acme"],
    )
    assert "acme" not in json.dumps(shown)
    assert "10.1.2.3" not in json.dumps(shown)
    [topic] = shown["topics.json"]["topics"]
    [problem] = shown["overview.json"]["problems"]
    assert problem["text"].startswith(f"the topic {topic['name']}. The group hidden-")
    assert len(shown["proxy.log"]) == 3


def test_each_bundle_has_other_hashes() -> None:
    first, second = (anonymous(topics={"topics": [{"name": "acme"}]}) for _ in range(2))
    assert first["topics.json"] != second["topics.json"]


def free_text(text: str) -> str:
    [line] = anonymous(proxy_log=[json.dumps({"event": text})])["proxy.log"]
    return str(line["event"])


@pytest.mark.parametrize(
    "address",
    [
        "::1",
        "2001:db8::7",
        "2001:0db8:0000:0000:0000:0000:0000:0007",
        "1:2:3:4:5:6:7:8",
        "::ffff:10.1.2.3",
        "fe80::1%eth0",
        "FE80::1",
        "fe80::",
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "{}",
        "dial {}: refused",
        "[{}]:8080",
        "peer ipv6:%5B{}%5D:4711.",
        "ipv6:{}",
        "peer:{}",
        "from node-x:{}, again",
        "at {}.",
    ],
)
def test_an_ipv6_address_in_a_text_becomes_a_hash(form: str, address: str) -> None:
    before, _, after = form.partition("{}")
    shown = free_text(form.format(address))
    assert re.fullmatch(f"{re.escape(before)}hidden-[0-9a-f]{{10}}{re.escape(after)}", shown), shown


@pytest.mark.parametrize("before", [" :", "node-1:", "x: :"])
def test_an_ipv6_address_behind_digits_or_a_bare_colon_is_hidden(before: str) -> None:
    shown = free_text(f"{before}2001:db8::7 again")
    assert re.fullmatch("[a-z: -]*hidden-[0-9a-f]{10} again", shown), shown


def test_the_forms_of_an_ipv6_address_have_one_hash() -> None:
    first, second, other = free_text("2001:db8::7 2001:DB8:0::0007 2001:db8::8").split()
    assert first == second != other


@pytest.mark.parametrize(
    "text",
    [
        "at 12:30:01",
        "12:30:01.250",
        "2026-12-01T12:30:01Z",
        "took 1:02",
        "std::vector",
        "00:1b:44:11:3a:b7",
        "a:b:c",
        "broker-0:52326",
    ],
)
def test_times_and_other_texts_with_colons_stay(text: str) -> None:
    assert free_text(text) == text
