"""The console of a standalone, as a browser without script calls it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.test_rest_users import tidemill
from tests.support.clients.api import api
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone

OWN = {"Sec-Fetch-Site": "same-origin"}
STREAM_S = 30.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("console") / "data") as started:
        yield started


@pytest.fixture
def browser(running: Standalone) -> Iterator[httpx.Client]:
    url = f"{running.admin}/ui"
    with httpx.Client(trust_env=False, timeout=30, base_url=url, follow_redirects=True) as http:
        yield http


def sent(browser: httpx.Client, path: str, **fields: str) -> httpx.Response:
    """Send the form of a page of the console itself."""
    return browser.post(path, data=fields, headers=OWN)


def performed(browser: httpx.Client, path: str, **fields: str) -> httpx.Response:
    """Look at the effect of an action, and perform it."""
    planned = browser.get(path, params={"sent": "1", **fields}, headers=OWN).text
    [plan] = re.findall(r'name="planned" value="([^"]*)"', planned)
    return sent(browser, path, planned=unescape(plan), **fields)


def test_the_root_leads_to_the_console_and_each_page_has_the_policy(
    running: Standalone, browser: httpx.Client
) -> None:
    page = browser.get(f"{running.admin}/")
    assert page.url.path == "/ui/overview"
    policy = page.headers["Content-Security-Policy"]
    [nonce] = re.findall(r"script-src 'self' 'nonce-([\w-]+)'", policy)
    assert "unsafe" not in policy
    assert set(re.findall(r'nonce="([^"]*)"', page.text)) == {nonce}
    assert nonce not in browser.get("/topics").text
    for name in re.findall(r'(?:src|href)="(/ui/files/[^"]+)"', page.text):
        assert browser.get(f"{running.admin}{name}").status_code == 200, name


def test_pages_are_small(running: Standalone, browser: httpx.Client) -> None:
    page = browser.get("/timers")
    assert page.headers["content-encoding"] == "gzip"
    page_bytes = page.num_bytes_downloaded
    files = set(re.findall(r'(?:src|href)="(/ui/files/[^"]+)"', page.text))
    assert len(files) > 4
    files_bytes = sum(len(browser.get(f"{running.admin}{file}").content) for file in files)
    assert page_bytes <= 30 << 10
    assert page_bytes + files_bytes <= 100 << 10


def test_a_topic_is_created_shown_purged_and_deleted(browser: httpx.Client) -> None:
    assert browser.get("/new-topic", params={"topic": "orders"}).url.path == "/ui/topics/orders/set"
    done = performed(browser, "/topics/orders/set", messageType="NORMAL", queues="3")
    assert done.url.path.startswith("/ui/results/")
    assert "Change orders: done" in done.text
    assert "orders" in browser.get("/topics").text
    assert browser.get("/topics/orders").text.count("<tr>") == 1 + 3
    api = str(browser.base_url).replace("/ui/", "/api/v1")
    for _ in range(5):
        browser.post(f"{api}/topics/orders/messages", json={"body": "x"}).raise_for_status()
    planned = browser.get("/topics/orders/purge")
    assert "Remove 5 messages of orders" in planned.text
    assert ">5</dd>" in browser.get("/topics/orders").text, "a dry run removes nothing"
    assert "Purge orders: done" in performed(browser, "/topics/orders/purge", all="true").text
    assert ">0</dd>" in browser.get("/topics/orders").text
    assert "Delete orders: done" in performed(browser, "/topics/orders/delete").text
    gone = browser.get("/topics/orders")
    assert gone.status_code == 404
    assert "orders" in gone.text


def test_a_timer_is_found_by_its_key_moved_delivered_and_cancelled(
    running: Standalone, browser: httpx.Client
) -> None:
    running.put("topics/reminders", messageType="DELAY")
    api = f"{running.admin}/api/v1"
    hour_ms = 3_600_000
    due_ms = (time.time_ns() // 1_000_000 // hour_ms + 2) * hour_ms
    for key in ("moved", "fired", "cancelled"):
        new = {"body": key, "keys": [key], "deliverAtMs": due_ms}
        browser.post(f"{api}/topics/reminders/messages", json=new).raise_for_status()
    shown = browser.get("/timers", params={"topic": "reminders"})
    assert "<strong>3</strong> waiting in reminders" in shown.text
    [cell] = re.findall(r'<td class="h6"><a href="([^"]+)"', shown.text)
    found = browser.get(f"/timers{unescape(cell)}").text
    assert found.count('name="ids" value="broker-0:') == 3

    def path_of(key: str) -> str:
        found = browser.get("/timers", params={"topic": "reminders", "key": key}).text
        [path] = re.findall(r'href="/ui(/timers/[\w-]+/\d+)"', found)
        return str(path)

    moved = path_of("moved")
    assert ": done" in performed(browser, f"{moved}/reschedule", dueAtMs="2027-06-01T12:00:00").text
    assert "2027-06-01 12:00:00.000Z" in browser.get(moved).text
    fired = path_of("fired")
    assert ": done" in performed(browser, f"{fired}/fire").text
    eventually(lambda: "DELIVERED" in browser.get(fired).text)
    cancelled = path_of("cancelled")
    planned = browser.get(f"{cancelled}/cancel")
    assert "reminders" in planned.text
    assert "PENDING" in browser.get(cancelled).text
    assert ": done" in performed(browser, f"{cancelled}/cancel").text
    assert "CANCELLED" in browser.get(cancelled).text
    again = sent(browser, f"{moved}/reschedule")
    assert again.status_code == 400
    assert "dueAtMs" in again.text


def test_lists_have_numbers_and_the_worst_group_first(
    running: Standalone, browser: httpx.Client
) -> None:
    running.put("topics/busy")
    running.put("topics/quiet")
    running.put("groups/lagging")
    running.put("groups/a-new-one")
    rest = f"{running.admin}/api/v1"
    for _ in range(3):
        browser.post(f"{rest}/topics/busy/messages", json={"body": "x"}).raise_for_status()
    asyncio.run(received(running.grpc, "busy", "lagging"))

    def rows_of(path: str) -> dict[str, list[str]]:
        rows = re.findall(
            r"<tr[^>]*><th scope=\"row\">(.*?)</tr>", browser.get(path).text, re.DOTALL
        )
        cells = (re.sub(r"<[^>]+>", "|", row).split("|") for row in rows)
        shown = ([cell.strip() for cell in row if cell.strip()] for row in cells)
        return {row[0]: row[1:] for row in shown}

    eventually(lambda: rows_of("/groups")["lagging"][1] == "3", within_ms=30_000)
    groups = rows_of("/groups")
    assert next(iter(groups)) == "lagging"
    assert groups["a-new-one"][:3] == ["never polled", "none", "none"]
    # Without ids, a refresh with new numbers moves the focus to the row at the same position.
    assert 'id="group-lagging"' in browser.get("/groups").text
    assert 'id="topic-busy"' in browser.get("/topics").text
    by_name = list(rows_of("/groups?sort=name"))
    assert by_name == sorted(by_name)
    assert list(rows_of("/groups?prefix=a-new")) == ["a-new-one"]
    assert "No consumer group has such a name" in browser.get("/groups?prefix=absent").text
    topics = rows_of("/topics?sort=-messages")
    assert next(iter(topics)) == "busy"
    assert topics["busy"][2] == "3"
    assert topics["quiet"][0] == "no consumer"
    assert ">lagging</a> (lag 3)" in browser.get("/topics/busy").text
    assert "<dt>State</dt><dd>never polled</dd>" in browser.get("/groups/a-new-one").text


async def received(endpoint: str, topic: str, group: str) -> None:
    """Receive a message, and keep it."""
    async with api(endpoint, call_s=30) as client:
        while not await client.receive(topic, group, batch_size=1, invisible_ms=3_600_000):
            pass


def test_a_wrong_input_is_shown_again_with_its_reason(browser: httpx.Client) -> None:
    again = sent(browser, "/topics/orders/set", queues="many")
    assert again.status_code == 400
    assert "&#39;many&#39; is not a whole number" in again.text
    assert 'value="many"' in again.text
    refused = performed(browser, "/topics/orders/set", queues="5000")
    assert refused.status_code == 400
    assert "queues: " in refused.text


def test_a_change_of_another_person_is_shown_and_not_replaced(
    running: Standalone, browser: httpx.Client
) -> None:
    running.put("users/shared", entries=[{"resource": "Topic:a", "actions": ["Pub"]}])
    path = "/security/users/shared/set"
    [tag] = re.findall(r'name="etag" value="([^"]*)"', browser.get(path).text)
    etag = unescape(tag)
    running.put("users/shared", entries=[{"resource": "Topic:b", "actions": ["Pub"]}])
    fields = {"etag": etag, "enabled": "true", "type": "NORMAL", "entries": "Topic:c Pub"}
    refused = performed(browser, path, **fields)
    assert refused.status_code == 412
    assert "Another change came" in refused.text
    assert "<td>Topic:b Pub</td><td>Topic:c Pub</td>" in refused.text
    [entry] = running.get("users/shared")["entries"]
    assert entry["resource"] == "Topic:b"
    [tag] = re.findall(r'name="etag" value="([^"]*)"', refused.text)
    assert "done" in performed(browser, path, **{**fields, "etag": unescape(tag)}).text
    [entry] = running.get("users/shared")["entries"]
    assert entry["resource"] == "Topic:c"


def test_a_shorter_retention_is_saved_after_its_loss_is_shown(
    running: Standalone, browser: httpx.Client
) -> None:
    running.put("topics/kept", retention={"ms": 90_000_000})
    path, fields = "/topics/kept/set", {"retention.ms": "80000000"}
    unseen = sent(browser, path, **fields)
    assert unseen.status_code == 400
    assert "look at the effect" in unseen.text
    assert running.get("topics/kept")["retention"] == {"ms": 90_000_000}
    shown = browser.get(path, params={"sent": "1", **fields}).text
    assert "<dt>Retention in ms</dt><dd>80,000,000</dd>" in shown
    assert "<dt>Messages that expire</dt><dd>0</dd>" in shown
    assert "Save kept and remove 0 messages" in shown
    assert "Change kept: done" in performed(browser, path, **fields).text
    assert running.get("topics/kept")["retention"] == {"ms": 80_000_000}


def test_a_retention_of_another_person_is_shown_as_a_difference(
    running: Standalone, browser: httpx.Client
) -> None:
    running.put("topics/disputed", retention={"ms": 70_000_000, "bytes": 1 << 30})
    path = "/topics/disputed/set"
    first = browser.get(path).text
    assert 'name="retention.ms" value="70000000"' in first
    [tag] = re.findall(r'name="etag" value="([^"]*)"', first)
    running.put("topics/disputed", retention={"ms": 80_000_000})
    fields = {"etag": unescape(tag), "retention.ms": "90000000", "retention.bytes": ""}
    refused = performed(browser, path, **fields)
    assert refused.status_code == 412
    assert "<td>80000000</td><td>90000000</td>" in refused.text
    [difference] = re.findall(r'<tr><th scope="row">([^<]*)', refused.text)
    assert difference == "Retention in ms", "an empty field changes nothing"


def test_a_runbook_is_shown_and_a_missing_one_is_not(browser: httpx.Client) -> None:
    assert "Mitigation" in browser.get("/runbooks/DiskFull").text
    assert "DiskFull" in browser.get("/runbooks").text
    for name in ("Missing", "..%2F..%2Fpage", "a" * 100):
        assert browser.get(f"/runbooks/{name}").status_code == 404


def test_markup_in_names_and_inputs_is_text(browser: httpx.Client) -> None:
    for path in ("/topics/%3Cscript%3Ealert(1)%3C%2Fscript%3E", "/topics?namespace=%22%3E%3Cb%3E"):
        shown = browser.get(path).text
        assert "<script>alert" not in shown
        assert "<b>" not in shown


def test_a_form_of_another_page_changes_nothing(running: Standalone, browser: httpx.Client) -> None:
    fields = {"messageType": "NORMAL"}
    for headers in ({}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = browser.post("/topics/foreign/set", data=fields, headers=headers)
        assert refused.status_code == 403, headers
    assert "foreign" not in json.dumps(running.get("topics"))


def test_the_page_of_the_cluster_shows_elections_of_replicas(tmp_path: Path) -> None:
    with (
        standalone(tmp_path / "data", "--replicas=3") as running,
        httpx.Client(trust_env=False, timeout=60, follow_redirects=True) as browser,
    ):
        page = browser.get(f"{running.admin}/ui/cluster")
        assert page.status_code == 200, page.text
        assert "Replicas of broker-0" in page.text
        moved = performed(browser, f"{running.admin}/ui/cluster/broker-0/transfer")
        assert "Move the master of broker-0: done" in moved.text, moved.text

        def is_shown() -> bool:
            shown = browser.get(f"{running.admin}/ui/cluster").text
            return re.search(r"<td>\d+ to \d+</td>", shown) is not None

        eventually(is_shown)


def events_of(answer: httpx.Response) -> Iterator[str]:
    """Yield the events of a stream."""
    lines: list[str] = []
    for line in answer.iter_lines():
        if line:
            lines.append(line)
        else:
            yield "\n".join(lines)
            lines = []


def test_a_stream_sends_the_live_part_again_when_it_changes(browser: httpx.Client) -> None:
    view = {"view": "/ui/topics"}
    with browser.stream("GET", "/events", params=view, timeout=STREAM_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer)
        assert "streamed" not in next(events)
        performed(browser, "/topics/streamed/set", messageType="NORMAL")
        silent = 0
        for event in events:
            if "streamed" in event:
                break
            assert event == "event: alive\ndata:"
            silent += 1
        assert silent < STREAM_S
    other = browser.get("/events", params={"view": "/ui/results/x"})
    assert other.status_code == 400


def test_with_users_pages_need_a_login_and_show_what_the_user_may_see(tmp_path: Path) -> None:
    with (
        standalone(tmp_path / "data") as running,
        httpx.Client(trust_env=False, timeout=30, follow_redirects=True, headers=OWN) as browser,
    ):
        running.put("topics/orders")
        running.put("topics/hidden")
        new = {"body": "x", "keys": ["k"]}
        stored = browser.post(f"{running.admin}/api/v1/topics/orders/messages", json=new)
        message_id = stored.raise_for_status().json()["messageId"]
        enabled = tidemill(running, tmp_path, "security", "enable")
        assert enabled.returncode == 0
        made = tidemill(running, tmp_path, "user", "create", "eve")
        secret = json.loads(made.stdout)["secret"]
        allowed = tidemill(running, tmp_path, "acl", "allow", "User:eve", "Topic:orders", "get")
        assert allowed.returncode == 0, allowed.stderr
        ui = f"{running.admin}/ui"
        eventually(lambda: "/ui/login" in str(browser.get(f"{ui}/topics").url))
        login = browser.get(f"{ui}/topics?system=true")
        assert dict(httpx.QueryParams(login.url.query))["next"] == "/ui/topics?system=true"
        wrong = sent(browser, f"{ui}/login", user="eve", secret="a-secret-9", next="/ui/topics")
        assert wrong.status_code == 401
        assert 'value="eve"' in wrong.text
        assert "a-secret-9" not in wrong.text
        shown = sent(browser, f"{ui}/login", user="eve", secret=secret, next="//evil.example/x")
        assert urlsplit(str(shown.url)).path == "/ui/overview"
        assert "orders" in shown.text
        assert "hidden" not in shown.text
        found = browser.get(f"{ui}/topics/orders/messages/{message_id}")
        assert found.status_code == 200
        assert "needs the right Sub" in found.text
        refused = browser.get(f"{ui}/topics/hidden")
        assert refused.status_code == 403
        assert "may not" in refused.text
        page = browser.get(f"{ui}/topics/orders").text
        assert "needs Delete on Topic:orders" in page
        assert f"{urlsplit(ui).path}/topics/orders/delete" not in page
        deletion = performed(browser, f"{ui}/topics/orders/delete")
        assert deletion.status_code == 403
        assert "/ui/login" in str(sent(browser, f"{ui}/logout").url)
        assert "/ui/login" in str(browser.get(f"{ui}/topics").url)
        records = json.loads(tidemill(running, tmp_path, "audit", "list").stdout)
        assert "session" in json.dumps(records)
        first = json.loads(enabled.stdout)
        sent(browser, f"{ui}/login", user="admin", secret=first["secret"])
        made_here = browser.get(f"{ui}/new-user", params={"name": "otto"})
        assert made_here.url.path.endswith("/users/otto/set")
        once = performed(browser, f"{ui}/security/users/otto/set", enabled="true")
        [shown_once] = re.findall(r"Secret, shown once</dt><dd>([^<]+)</dd>", once.text)
        assert shown_once not in browser.get(str(once.url)).text
        form = browser.get(f"{ui}/security/users/otto/set").text
        assert 'name="enabled" value="true" checked' in form
        performed(browser, f"{ui}/security/users/otto/set", type="NORMAL")
        assert "disabled" in browser.get(f"{ui}/security/users/otto").text
        form = browser.get(f"{ui}/security/users/otto/set").text
        assert 'name="enabled" value="true">' in form, "an untouched form changes nothing"
        asked = {"user": "eve", "action": "Get", "resource": "Topic:orders"}
        assert "<strong>yes</strong>" in browser.get(f"{ui}/security", params=asked).text
        asked["resource"] = "Topic:hidden"
        assert "<strong>no</strong>" in browser.get(f"{ui}/security", params=asked).text


def test_definitions_are_applied_after_their_effect_is_shown(
    running: Standalone, browser: httpx.Client
) -> None:
    path, file = "/settings-definitions/apply", '{"topics": [{"name": "defined", "queues": 3}]}'
    shown = sent(browser, path, file=file, show="1")
    assert "create topic defined" in shown.text
    assert "Make 1 changes" in shown.text
    assert httpx.get(f"{running.admin}/api/v1/topics/defined", trust_env=False).status_code == 404
    [plan] = re.findall(r'name="planned" value="([^"]*)"', shown.text)
    unseen = sent(browser, path, file=file.replace("3", "4"), planned=plan)
    assert "are not those of the shown effect" in unseen.text
    [tag] = re.findall(r'name="etag" value="([^"]*)"', shown.text)
    stale = sent(browser, path, file=file, planned=plan, etag='"0"')
    assert "the cluster has changed since the dry run" in stale.text
    begun = sent(browser, path, file=file, planned=plan, etag=unescape(tag))
    assert begun.url.path.startswith("/ui/operations/admin")
    eventually(lambda: "<strong>done</strong>" in browser.get(str(begun.url)).text)
    assert "defined" in browser.get("/topics/defined").text
    for strange in ("a: [", "5", "[" * 100_000, '{"topics": 7}'):
        refused = sent(browser, path, file=strange, show="1")
        assert 'class="alarm"' in refused.text, strange


def test_an_operation_of_an_ended_admin_process_is_shown(browser: httpx.Client) -> None:
    hour_ago_ms = time.time_ns() // 1_000_000 - 3_600_000
    shown = browser.get(f"/operations/admin:{hour_ago_ms:013}101")
    assert shown.status_code == 200
    assert "<strong>failed</strong>: its admin process has ended" in shown.text
    assert "<dd>unknown</dd>" in shown.text


def test_a_support_bundle_is_made_and_downloaded(browser: httpx.Client) -> None:
    begun = sent(browser, "/settings-bundle/make", anonymize="true")
    page = str(begun.url)
    eventually(lambda: "Download the bundle" in browser.get(page).text)
    [link] = re.findall(r'href="(/api/v1/support-bundles/[^"]+)"', browser.get(page).text)
    assert browser.get(httpx.URL(page).join(link)).content[:2] == b"\x1f\x8b"


def test_an_action_needs_the_fields_of_its_shown_effect(browser: httpx.Client) -> None:
    assert ": done" in performed(browser, "/topics/guarded/set", messageType="NORMAL").text
    first = browser.get("/topics/guarded/purge").text
    [plan] = re.findall(r'name="planned" value="([^"]*)"', first)
    changed = {"beforeTimestampMs": "2026-01-01T00:00:00", "planned": unescape(plan)}
    refused = sent(browser, "/topics/guarded/purge", **changed)
    assert refused.status_code == 400
    assert "look at the effect" in refused.text
    assert 'value="2026-01-01T00:00:00"' in refused.text, "the input stays"


def test_an_address_that_is_none_is_refused(browser: httpx.Client) -> None:
    assert browser.get("/events", params={"view": "//["}).status_code == 400


def test_a_large_message_is_sent_by_the_form(running: Standalone, browser: httpx.Client) -> None:
    running.put("topics/large")
    assert ": done" in sent(browser, "/topics/large/send", body="x" * 200_000).text


def test_the_form_creates_a_missing_topic_only_if_its_box_is_set(browser: httpx.Client) -> None:
    refused = sent(browser, "/topics/boxed/send", body="x")
    assert refused.status_code == 404
    assert "there is no topic &#39;boxed&#39;" in refused.text
    assert 'name="create"' in refused.text
    assert browser.get("/topics/boxed").status_code == 404
    assert ": done" in sent(browser, "/topics/boxed/send", body="x", create="true").text
    assert browser.get("/topics/boxed").status_code == 200


def test_an_open_stream_delays_no_stop(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as started, httpx.Client(trust_env=False) as http:
        view = {"view": "/ui/topics"}
        url = f"{started.admin}/ui/events"
        with http.stream("GET", url, params=view, timeout=STREAM_S) as answer:
            events = events_of(answer)
            next(events)
            assert started.stop() == 0
            assert "event: end\ndata: the admin process stops" in list(events)
        assert "Traceback" not in started.log.read_text()
