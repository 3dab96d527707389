"""A page in a headless browser: what it loads, what it complains of, what it says under the mouse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """An open page, with the errors of its scripts and the addresses that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def under_mouse(self, figure: int, across: float, down: int) -> str:
        """The tip at a part of the width of a figure, and so many pixels below its top."""
        box = self.page.locator(".bk-Figure").nth(figure).bounding_box()
        self.page.mouse.move(box["x"] + across * box["width"], box["y"] + down)
        self.page.wait_for_timeout(100)
        tips = self.page.locator(".bk-Tooltip .bk-tooltip-content:visible")
        return str(tips.first.inner_text()) if tips.count() else ""


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Opens a file; the test is skipped where there is no browser, or no playwright to drive it."""
    api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser: apt-get install chromium")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        result = Opened(browser.new_page(viewport={"width": 1220, "height": 900}))
        result.page.on("pageerror", lambda error: result.errors.append(str(error)))
        result.page.on("console", lambda said: result.errors.append(said.text) if said.type == "error" else None)
        result.page.on("request", lambda request: result.asked.append(request.url))
        result.page.goto(path.as_uri())
        result.page.wait_for_selector(".bk-Figure")
        yield result
        browser.close()
