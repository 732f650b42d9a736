"""The live page as text and picture, for readers without a screen: look.py URL [ACTION...].

Prints the page as a screen reader gets it, after the actions, and writes a screenshot. Needs playwright and Debian's
chromium. Actions, in their order:

  wait:SECONDS     ask:TEXT     system:TEXT     fresh      (a new chat)
  table            click:X,Y    press:KEY                  (of the prefix tree: its table; X, Y in pixels; ArrowDown)
  replica:URL      width:PIXELS
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
SETTLE_MS = 2500  # until the tree is drawn


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.click("#send")
    page.wait_for_function("() => !document.getElementById('send').disabled")


def system(page: Page, text: str) -> None:
    page.evaluate("document.querySelector('#ask details').open = true")
    page.fill("#system", text)


def click(page: Page, place: str) -> None:
    x, y = map(float, place.split(","))
    page.click("#icicle", position={"x": x, "y": y})


def resize(page: Page, pixels: str) -> None:
    page.set_viewport_size({"width": int(pixels), "height": 900})


ACTIONS: dict[str, Callable[[Page, str], object]] = {
    "wait": lambda page, seconds: page.wait_for_timeout(1000 * float(seconds)),
    "ask": ask,
    "system": system,
    "fresh": lambda page, _: page.click("#fresh"),
    "table": lambda page, _: page.click("#table > summary"),
    "click": click,
    "press": lambda page, key: page.press("#icicle", key),
    "replica": lambda page, url: page.select_option("#replica", url),
    "width": resize,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--key", default=os.environ.get("HEADSTART_ADMIN_API_KEY", ""))
    parser.add_argument("--picture", type=Path, default=Path("page.png"))
    parser.add_argument("actions", nargs="*", metavar="ACTION")
    given = parser.parse_intermixed_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        page.goto(given.url)
        if given.key:
            page.fill("#key", given.key)
            page.click("#keys button")
        page.wait_for_selector("#status.live")
        page.wait_for_timeout(SETTLE_MS)
        for action in given.actions:
            name, _, value = action.partition(":")
            ACTIONS[name](page, value)
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=given.picture, full_page=True)
        print(page.locator("body").aria_snapshot())
        print(f"picture: {given.picture}")
        browser.close()


if __name__ == "__main__":
    main()
