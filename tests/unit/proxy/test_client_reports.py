"""Reports about clients: their content, their frequency and their limits."""

from __future__ import annotations

import asyncio

from tidemill.message.client_key import ClientKey
from tidemill.proxy.link.batching import FrameBatcher
from tidemill.proxy.link.client_reports import (
    CLIENTS_PER_FRAME_MAX,
    HANDOVER_RETENTION_MS,
    HANDOVERS_MAX,
    HANDOVERS_PER_FRAME_MAX,
    REPORT_PERIOD_MS,
    SUBSCRIPTIONS_PER_FRAME_MAX,
    ClientReports,
    FrameReports,
)
from tidemill.proxy.link.commands import APPEND
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def test_a_client_is_reported_once_per_period() -> None:
    reports = ClientReports(clients_max=10)
    assert reports.add_alive(ClientKey("a"), 0)
    assert reports.take() == FrameReports([ClientKey("a")], [], [], [], [], [])
    assert not reports.add_alive(ClientKey("a"), REPORT_PERIOD_MS - 1)
    assert not reports
    assert reports.add_alive(ClientKey("a"), REPORT_PERIOD_MS)
    assert reports.take() == FrameReports([ClientKey("a")], [], [], [], [], [])


def test_an_end_replaces_a_waiting_report() -> None:
    reports = ClientReports(clients_max=10)
    reports.add_alive(ClientKey("a"), 0)
    reports.add_ended(ClientKey("a"))
    assert reports.take() == FrameReports([], [ClientKey("a")], [], [], [], [])
    assert reports.add_alive(ClientKey("a"), 1), "a new start is reported at once"


def test_a_new_stream_gets_all_reports_again() -> None:
    reports = ClientReports(clients_max=10)
    reports.add_alive(ClientKey("a"), 0)
    reports.take()
    reports.close()
    assert reports.add_alive(ClientKey("a"), 1)


def test_waiting_reports_and_known_clients_are_limited() -> None:
    reports = ClientReports(clients_max=3)
    for n in range(10):
        reports.add_alive(ClientKey(f"alive-{n}"), n)
        reports.add_ended(ClientKey(f"ended-{n}"))
    assert reports.take() == FrameReports(
        [ClientKey("alive-7"), ClientKey("alive-8"), ClientKey("alive-9")],
        [ClientKey("ended-7"), ClientKey("ended-8"), ClientKey("ended-9")],
        [],
        [],
        [],
        [],
    )
    assert reports.add_alive(ClientKey("alive-6"), 11), "the client was forgotten"
    assert not reports.add_alive(ClientKey("alive-8"), 11)


def test_a_frame_has_a_limited_number_of_clients() -> None:
    reports = ClientReports(clients_max=10_000)
    for n in range(CLIENTS_PER_FRAME_MAX + 1):
        reports.add_alive(ClientKey(f"client-{n}"), 0)
    assert len(reports.take().alive) == CLIENTS_PER_FRAME_MAX
    assert reports.take() == FrameReports(
        [ClientKey(f"client-{CLIENTS_PER_FRAME_MAX}")], [], [], [], [], []
    )


def test_reports_wait_for_a_request_and_ends_do_not() -> None:
    async def main() -> None:
        frames: list[pb.RequestFrame] = []
        reports = ClientReports(clients_max=10)
        batching = FrameBatcher(range(0), frames.append, reports)
        reports.add_alive(ClientKey("a"), 0)
        batching.send_reports()
        batching.open()
        await asyncio.sleep(0)
        assert [list(frame.alive_clients) for frame in frames] == [["a"]], (
            "the report waited for the stream"
        )
        batching.mark_answered(1)
        reports.add_alive(ClientKey("b"), 0)
        batching.send_reports()
        await asyncio.sleep(0)
        assert len(frames) == 1
        batching.add(APPEND, (1, 1, 0, 0, b"blob", 0))
        await asyncio.sleep(0)
        assert list(frames[1].alive_clients) == ["b"]
        batching.mark_answered(2)
        reports.add_ended(ClientKey("b"))
        batching.send_reports()
        await asyncio.sleep(0)
        assert list(frames[2].ended_clients) == ["b"]

    asyncio.run(main())


def test_handovers_of_the_last_minute_are_reported_on_each_stream() -> None:
    reports = ClientReports(clients_max=10)
    reports.add_handovers([(1, 100), (2, 200)], 0)
    assert reports.take().handovers == [(1, 100), (2, 200)]
    assert not reports
    reports.add_handovers([(3, 300)], HANDOVER_RETENTION_MS)
    assert reports.take().handovers == [(3, 300)]
    reports.close()
    assert reports.take().handovers == [(1, 100), (2, 200), (3, 300)]
    reports.add_handovers([(4, 400)], HANDOVER_RETENTION_MS + 1)
    reports.close()
    assert reports.take().handovers == [(3, 300), (4, 400)]
    reports.forget_store()
    reports.close()
    assert not reports


def test_subscriptions_are_reported_once_per_stream() -> None:
    reports = ClientReports(clients_max=10)
    assert reports.add_subscription(1, 10)
    assert not reports.add_subscription(1, 10)
    assert reports.take().subscriptions == [(1, 10)]
    assert not reports
    reports.add_subscription(2, 20)
    reports.close()
    assert reports.take().subscriptions == [(1, 10), (2, 20)]
    reports.add_subscription(3, 30)
    reports.forget_store()
    reports.close()
    assert not reports


def test_a_frame_has_a_limited_number_of_subscriptions() -> None:
    reports = ClientReports(clients_max=10)
    for n in range(SUBSCRIPTIONS_PER_FRAME_MAX + 1):
        reports.add_subscription(n, 1)
    assert len(reports.take().subscriptions) == SUBSCRIPTIONS_PER_FRAME_MAX
    assert reports.take().subscriptions == [(SUBSCRIPTIONS_PER_FRAME_MAX, 1)]


def test_a_stopping_proxy_waits_for_the_answer_to_all_reports() -> None:
    async def main() -> None:
        frames: list[pb.RequestFrame] = []
        reports = ClientReports(clients_max=10)
        batching = FrameBatcher(range(0), frames.append, reports)
        await batching.wait_reported()
        assert frames == [], "there is no stream"
        batching.open()
        await batching.wait_reported()
        assert frames == [], "no report is due"
        reports.add_handovers([(1, 100)], 0)
        telling = asyncio.ensure_future(batching.wait_reported())
        for _ in range(3):
            await asyncio.sleep(0)
        assert [list(frame.handed_over.delivery_ids) for frame in frames] == [[100]]
        assert not telling.done()
        batching.mark_answered(1)
        await telling

    asyncio.run(main())


def test_a_frame_has_a_limited_number_of_handovers() -> None:
    reports = ClientReports(clients_max=10)
    reports.add_handovers([(n, n) for n in range(HANDOVERS_MAX + 1)], 0)
    reported = []
    while reports:
        reported += reports.take().handovers
        assert len(reported) % HANDOVERS_PER_FRAME_MAX == 0
    assert reported == [(n, n) for n in range(1, HANDOVERS_MAX + 1)]
