"""Work on pages as a person: with a mouse, by keyboard alone, and without script.

A step is a field, an activation, or a chord of keys. A page may need few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from tests.support.eventually import eventually
from tidemill.admin.console.page import NAVIGATION, ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

STEPS_MAX: Final = 4  # on one page
TABS_MAX: Final = 1_500  # a heat map has hundreds of links


class Hand(Protocol):
    """A way to work on one tab of a browser."""

    page: Page

    def open(self, title: str) -> None:
        """Open a page of the navigation by its title."""

    def press(self, button: Locator) -> None:
        """Activate a link, a button or a checkbox."""

    def fill(self, field: Locator, text: str) -> None:
        """Replace the text of a field."""

    def choose(self, field: Locator, option: str) -> None:
        """Choose an option of a list."""

    def sees(self, text: str) -> None:
        """Wait until the main part of the page shows a text."""


class Steps:
    """Counts the steps on each page, and rejects a page that needs too many."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._url = ""
        self._count = 0

    def add(self) -> None:
        if self._page.url != self._url:
            self._url, self._count = self._page.url, 0
        self._count += 1
        assert self._count <= STEPS_MAX, f"more than {STEPS_MAX} steps on {self._url}"


class Mouse:
    """A mouse, for pages with and without script."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def open(self, title: str) -> None:
        self.press(self.page.get_by_label("Pages").get_by_role("link", name=title, exact=True))

    def press(self, button: Locator) -> None:
        button.click()

    def fill(self, field: Locator, text: str) -> None:
        field.fill(text)

    def choose(self, field: Locator, option: str) -> None:
        field.select_option(label=option)

    def sees(self, text: str) -> None:
        self.page.locator("main").get_by_text(text).first.wait_for()


class WithoutScript(Mouse):
    """A mouse on pages without script, which need a reload for new data."""

    def sees(self, text: str) -> None:
        def look() -> bool:
            self.page.reload()
            return text in self.page.locator("main").inner_text()

        if text not in self.page.locator("main").inner_text():
            eventually(look)


class Keyboard:
    """The keyboard alone: chords, Tab, Enter, Space, and typed text."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._steps = Steps(page)

    def open(self, title: str) -> None:
        [(path, key)] = [(path, key) for path, text, key in NAVIGATION if text == title]
        self._steps.add()
        self.page.keyboard.press("g")
        self.page.keyboard.press(key)
        self.page.wait_for_url(f"**{ROOT}{path}")

    def press(self, button: Locator) -> None:
        self._reach(button)
        is_box = button.get_attribute("type") == "checkbox"
        self.page.keyboard.press("Space" if is_box else "Enter")

    def fill(self, field: Locator, text: str) -> None:
        self._reach(field)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)

    def choose(self, field: Locator, option: str) -> None:
        self._reach(field)
        self.page.keyboard.type(option)

    def sees(self, text: str) -> None:
        self.page.locator("main").get_by_text(text).first.wait_for()

    def _reach(self, target: Locator) -> None:
        """Press Tab until the target has the focus."""
        target.wait_for()
        self._steps.add()
        for _ in range(TABS_MAX):
            if target.evaluate("each => each === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {target}")
