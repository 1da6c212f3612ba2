"""Chromium, and a standalone with data in every page of the console."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.console.world import ConsoleWorld, filled_world
from tests.support.processes.processes import standalone

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# Without these, Chromium looks for updates and experiments on the internet.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 30_000.0
DESKTOP = {"width": 1280, "height": 800}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of this folder without Chromium. If CI is set, they fail instead."""
    if shutil.which("chromium") or os.environ.get("CI"):
        return
    missing = pytest.mark.skip(reason="chromium is missing; as root, `make test` installs it")
    for item in items:
        if Path(item.fspath).is_relative_to(Path(__file__).parent):
            item.add_marker(missing)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    # Of a module, since other tests of the worker run event loops of their own.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with standalone(tmp_path_factory.mktemp("console") / "data", "--groups=2") as running:
        yield filled_world(running)


class Visitor:
    """Pages of a browser that must not write to the console of the browser."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self.complaints: list[str] = []

    @contextlib.contextmanager
    def page(self, path: str, **options: Any) -> Iterator[Page]:
        """Open a page in a fresh profile; `options` are those of a Playwright context."""
        with self.context(**options) as context:
            page = context.new_page()
            page.goto(f"{self._url}{path}")
            yield page

    @contextlib.contextmanager
    def context(self, **options: Any) -> Iterator[BrowserContext]:
        """Open a fresh profile at the address of the console."""
        context = self._browser.new_context(
            **{"viewport": DESKTOP, "base_url": self._url, **options}
        )
        context.set_default_timeout(WAIT_MS)
        context.on("console", lambda message: self.complaints.append(message.text))
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))
        try:
            yield context
        finally:
            context.close()


@pytest.fixture
def visitor(chromium: Browser, world: ConsoleWorld) -> Iterator[Visitor]:
    visiting = Visitor(chromium, world.admin)
    yield visiting
    assert not visiting.complaints
