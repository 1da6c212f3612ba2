"""The console: sizes, first paint, the time of pages with many topics, and 50 open pages.

A standalone has --topics topics and some consumer groups. Sizes are those on the wire, compressed.
First paint is the median of 9 loads in Chromium without a cache, if this machine has Chromium. The
cost of open pages is the CPU time and memory of the admin process beside one open page, and the
calls of its broker in that time.

    python -m tests.perf.bench_console [--topics 2000] [--pages 50] [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes.processes import Standalone, standalone

PAINTS = 9
AT_ONCE = 32  # topics that are created at the same time
PAGES = ("overview", "topics", "groups", "timers", "dead-letters", "clients", "cluster", "settings")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def create_topics(url: str, count: int) -> None:
    """Create topics, and some consumer groups."""
    slots = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as http:

        async def put(path: str) -> None:
            async with slots:
                (
                    await http.put(path, json={"queues": 1} if "topics" in path else {})
                ).raise_for_status()

        paths = [f"/api/v1/topics/topic-{number:06}" for number in range(count)]
        paths += [f"/api/v1/groups/group-{number:03}" for number in range(60)]
        await asyncio.gather(*map(put, paths))


def sizes(http: httpx.Client) -> dict[str, float]:
    """Return the transferred KiB of the first page with its files, and of each other page."""
    found: dict[str, float] = {}
    first = page_bytes(http, "/ui/overview")
    files = set(re.findall(r'(?:src|href)="(/ui/files/[^"]+)"', http.get("/ui/overview").text))
    found["first with files"] = round(
        (first + sum(page_bytes(http, one) for one in files)) / 1024, 1
    )
    for name in PAGES:
        found[name] = round(page_bytes(http, f"/ui/{name}") / 1024, 1)
    return found


def page_bytes(http: httpx.Client, path: str) -> int:
    with http.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as answer:
        answer.raise_for_status()
        return sum(len(part) for part in answer.iter_raw())


def times(http: httpx.Client) -> dict[str, float]:
    """Return the median time of each page in ms."""
    found = {}
    for name in PAGES:
        took = []
        for _ in range(PAINTS):
            began = time.perf_counter()
            http.get(f"/ui/{name}").raise_for_status()
            took.append((time.perf_counter() - began) * 1000)
        found[name] = round(statistics.median(took), 1)
    return found


def first_paint(url: str) -> float | None:
    """Return the median first paint of the overview in ms; None without Chromium."""
    chromium = shutil.which("chromium")
    # The tests of the console install Playwright here.
    sys.path.append(str(Path(sys.prefix) / "browser"))
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    found: list[float] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(PAINTS):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{url}/ui/overview")
            script = "performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)"
            while not (paints := page.evaluate(script)):
                page.wait_for_timeout(10)
            found.append(float(paints[0]))
            context.close()
        browser.close()
    return round(statistics.median(found), 1)


def usage_of(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and its memory in MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(resident.split()[1]) / 1024


@contextlib.asynccontextmanager
async def open_pages(url: str, count: int) -> AsyncIterator[None]:
    """Keep the streams of the overview open, as tabs do, until the block ends."""
    limits = httpx.Limits(max_connections=count)
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=None, limits=limits) as http,
        contextlib.AsyncExitStack() as opened,
    ):

        async def read(stream: httpx.Response) -> None:
            async for _ in stream.aiter_raw():
                pass

        tasks = []
        for _ in range(count):
            stream = http.stream("GET", "/ui/events", params={"view": "/ui/overview"})
            tasks.append(asyncio.create_task(read(await opened.enter_async_context(stream))))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def cost_of(running: Standalone, pages: int, seconds: float) -> dict[str, float]:
    pid = running.processes["admin"].pid
    async with open_pages(running.admin, pages):
        await asyncio.sleep(3)
        began_s, _ = usage_of(pid)
        await asyncio.sleep(seconds)
        ended_s, memory = usage_of(pid)
    return {"cpu_percent": round((ended_s - began_s) / seconds * 100, 1), "mib": round(memory, 1)}


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topics", type=int, default=2_000)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    wanted = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-console-"))
    result: dict[str, Any] = {"topics": wanted.topics}
    try:
        with standalone(folder / "data") as running:
            result["memory_before_mib"] = round(usage_of(running.processes["admin"].pid)[1], 1)
            asyncio.run(create_topics(running.admin, wanted.topics))
            with httpx.Client(base_url=running.admin, trust_env=False, timeout=60) as http:
                result["sizes_kib"] = sizes(http)
                result["times_ms"] = times(http)
            result["first_paint_ms"] = first_paint(running.admin)
            result["one_page"] = asyncio.run(cost_of(running, 1, wanted.seconds))
            result["pages"] = asyncio.run(cost_of(running, wanted.pages, wanted.seconds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
