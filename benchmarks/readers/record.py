"""Record the live page of a server under a small load as an animated picture: record.py URL PICTURE.webp.

Three applications send chats: one with a constant prompt, one with a long document, one that writes the time into the
front of its prompt. Needs playwright, pillow and Debian's chromium.
"""

import io
import itertools
import json
import sys
import threading
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
SIZE = {"width": 1060, "height": 1180}
FRAMES, FRAME_MS = 24, 600
RULES = "Sort each mail into one of: orders, refunds, praise, complaints, spam. Answer with one word. "
TEXT = "The library opens at nine. Books are lent for four weeks, and longer if no one waits for them. "
ASKED = {4: "Could you make it dark in the kitchen?", 12: "And in the hall?"}  # on the page, by frame
MAILS = ("Where is my parcel?", "The lamp is lovely!", "I want my money back.", "You have won a car!")


def chat(url: str, system: str, question: str) -> None:
    """Send one chat and wait for its answer."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = json.dumps({"messages": messages, "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def load(url: str, ended: threading.Event) -> None:
    """Send chats of the three applications in turn, until the end."""
    for number in itertools.count():
        if ended.is_set():
            return
        mail = MAILS[number % len(MAILS)]
        chat(url, RULES * 6, f"{number}: {mail}")
        chat(url, TEXT * (4 + 4 * (number % 3)), f"{number}: how long may I keep a book?")
        chat(url, f"Now it is 2026-11-27 10:{number % 60:02}:11. {RULES * 4}", mail)


def main() -> None:
    url, picture = sys.argv[1], Path(sys.argv[2])
    ended, frames = threading.Event(), list[Image.Image]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.evaluate("document.querySelector('#ask details').open = true")
        page.fill("#system", RULES * 6)
        sender = threading.Thread(target=load, args=(url, ended))
        sender.start()
        for number in range(FRAMES):
            began = time.monotonic()
            if number in ASKED:
                page.fill("#prompt", ASKED[number])
                page.click("#send")
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
            page.wait_for_timeout(max(FRAME_MS - 1000 * (time.monotonic() - began), 1))
        ended.set()
        sender.join()
        browser.close()
    frames[0].save(picture, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0, quality=60, method=4)
    frames[-1].save(picture.with_suffix(".png"))
    print(f"{len(frames)} frames, {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
