"""Chromium, driven by selenium, without a screen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import which
from typing import Any

from installed import need

DEADLINE_S = 60.0


class Tab:
    """One page at a time."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Opens a page of heteropp-board, and waits until it has shown all there is by then."""
        self.driver.get(address)
        self.wait_for("return window.board?.ready && board.runs.length > 0")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({selector!r}).innerText")

    def wait_for(self, script: str, accept: Callable[[Any], bool] = bool) -> Any:
        """Runs a script until its value is accepted, and returns that."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not accept(found := self.run(script)):
            assert time.monotonic() < deadline_s, f"{script} still gives {found!r}"
            time.sleep(0.05)
        return found

    def click_canvas(self, x: float, y: float) -> None:
        """Clicks on the timeline, as a mouse would; from its upper left corner."""
        from selenium.webdriver import ActionChains

        canvas = self.driver.find_element("css selector", "#timeline canvas")
        self.run("arguments[0].scrollIntoView({block: 'center'})".replace(
            "arguments[0]", "document.querySelector('#timeline canvas')"
        ))  # fmt: skip
        size = canvas.size
        actions = ActionChains(self.driver)
        offset = round(x - size["width"] / 2), round(y - size["height"] / 2)
        actions.move_to_element_with_offset(canvas, *offset).click().perform()

    def problems(self) -> list[str]:
        """What the console has complained about since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def offline(self, is_offline: bool) -> None:
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": is_offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
        )


@contextmanager
def chromium() -> Iterator[Tab]:
    """Skips the test where there is no Chromium."""
    need("chromium", "chromium")
    need("chromium-driver", "chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size=1400,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(which("chromedriver")))
    try:
        yield Tab(driver)
    finally:
        driver.quit()
