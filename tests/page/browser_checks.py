"""The live page in a real browser: python browser_checks.py OPEN_URL KEYED_URL ROUTER_URL FOLDER.

Needs playwright, axe-playwright-python and Debian's chromium. Writes a line of JSON per check: its name, and its error
or null. Screenshots go to FOLDER. The servers: one without keys that is also served below /llm, one with the keys `a`,
`b` and the administrator's key `root`, and a router of two replicas.
"""

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

PATIENCE = 240_000  # milliseconds
CHROMIUM = "/usr/bin/chromium"
SYSTEM = "You are the assistant of a library. Answer briefly, and name the shelf on which a book stands. " * 4
NUM_RUNS = 10_000


def post(url: str, path: str, body: Any, key: str = "", method: str = "POST") -> Any:
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers, method=method)) as answer:
        return json.load(answer)


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1280, scheme: Any = "light", allowed: tuple[str, ...] = ()
) -> Any:
    """A page at an address; at the end nothing may have been written to the console, but what is `allowed`."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE)
    errors: list[str] = []
    outside: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: outside.append(request.url))
    page.goto(url)
    yield page
    origin = "/".join(url.split("/")[:3])
    assert all(address.startswith(origin + "/") for address in outside), outside
    unexpected = [error for error in errors if not any(part in error for part in allowed)]
    assert not unexpected, unexpected
    page.close()


def live(page: Page) -> None:
    page.wait_for_selector("#status.live")


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.click("#send")
    page.wait_for_function("() => document.getElementById('send').disabled === false")
    assert page.locator("#turns .failed").count() == 0, page.locator("#turns").inner_text()


def summary_has(page: Page, expression: str) -> None:
    page.wait_for_function(
        f"() => {{ const text = document.getElementById('tree-summary').textContent; return {expression}; }}"
    )


def cached(page: Page) -> int:
    return int((page.locator("#tree-summary").inner_text().split(" ")[0]).replace(",", "").replace("Nothing", "0"))


def check_chat_colours_what_the_answer_reports(browser: Browser, urls: list[str]) -> None:
    with opened(browser, urls[0]) as page:
        live(page)
        page.click("summary:has-text('System prompt')")
        page.fill("#system", SYSTEM)
        ask(page, "Where is the atlas?")
        page.click("#fresh")
        page.fill("#system", SYSTEM)
        ask(page, "Where is the dictionary?")
        page.wait_for_selector(".rendered span.shared")
        messages = [
            {"role": "system", "content": SYSTEM.strip()},
            {"role": "user", "content": "Where is the dictionary?"},
        ]
        names = post(urls[0], "/tokenize", {"messages": messages, "return_token_strs": True})["token_strs"]
        title = page.locator(".rendered span.shared").get_attribute("title")
        num_cached = int(title.split()[1].replace(",", ""))
        assert num_cached >= 64 and num_cached % 16 == 0, title
        assert page.locator(".rendered span.shared").text_content() == "".join(names[:num_cached])
        assert page.locator(".rendered span.computed").text_content() == "".join(names[num_cached:])
        assert (
            f"{num_cached} of {len(names)} prompt tokens reused"
            in page.locator("summary:has-text('reused')").inner_text()
        )


def check_tree_follows_a_burst_a_pin_an_eviction_and_a_flush(browser: Browser, urls: list[str]) -> None:
    with opened(browser, urls[0]) as page:
        live(page)
        page.click("summary:has-text('As a table')")
        times: dict[str, float] = {}

        def follows(name: str, condition: str) -> None:
            """Wait until the page shows it, and note the time since the request for it was answered."""
            begun = time.perf_counter()
            page.wait_for_function(
                f"() => {{ const [text, rows] = [document.getElementById('tree-summary').textContent, "
                f"[...document.querySelectorAll('#runs tr')].map((one) => one.textContent)]; return {condition}; }}"
            )
            times[name] = round(time.perf_counter() - begun, 2)

        post(urls[0], "/reset_prefix_cache?pinned=true", {})
        follows("flush", "text.startsWith('Nothing')")
        words = "The fox of the forest runs over the hill and looks for the river that flows behind it. " * 3
        for name in ("Ann", "Bob", "Eve"):
            post(urls[0], "/v1/completions", {"prompt": f"{words} {name} sees it and says so.", "max_tokens": 1})
        follows("burst", "parseInt(text) >= 64 && rows.length >= 4")
        post(urls[0], "/v1/prefixes", {"name": "page-test", "text": words})
        follows("pin", "rows.some((one) => one.endsWith('yes'))")
        page.focus("#icicle")
        page.keyboard.press("ArrowDown")
        page.wait_for_function("() => document.getElementById('run').textContent.includes('pinned')")
        assert "Evictable" in page.locator("#run").inner_text()
        post(urls[0], "/v1/prefixes/page-test", None, method="DELETE")
        follows("unpin", "!rows.some((one) => one.endsWith('yes'))")
        for number in range(10):  # more than the pool
            post(urls[0], "/v1/completions", {"prompt": [300 + number] * 1000, "max_tokens": 1})
        follows("eviction", "rows.length > 4 && !rows.some((one) => one.includes('sees it'))")
        post(urls[0], "/reset_prefix_cache", {})
        follows("second flush", "text.startsWith('Nothing')")
        print(json.dumps({"seconds_until_shown": times}), file=sys.stderr)


def check_tenants_see_their_own(browser: Browser, urls: list[str]) -> None:
    text = "A tenant's own text, which is long enough to fill several blocks of the cache with words. " * 3
    post(urls[1], "/v1/completions", {"prompt": text, "max_tokens": 1}, "a")
    refused = ("401", "403")
    with opened(browser, urls[1], allowed=refused) as page:
        page.wait_for_selector("#notice:not([hidden])")
        assert "key" in page.locator("#notice").inner_text()
        for key, sees in (("b", False), ("a", True), ("root", True)):
            page.fill("#key", key)
            page.click("#keys button")
            live(page)
            summary_has(page, "parseInt(text) > 0" if sees else "text.startsWith('Nothing')")
        post(urls[1], "/v1/completions", {"prompt": text, "max_tokens": 1}, "b")
        page.wait_for_selector("#tenants:not([hidden])")
        assert page.locator("#shares tbody tr").count() == 2
        assert (
            "root" not in page.url
            and page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
        )


def check_a_router_shows_replicas_decisions_and_their_trees(browser: Browser, urls: list[str]) -> None:
    with opened(browser, urls[2]) as page:
        live(page)
        page.wait_for_function("() => document.querySelectorAll('.replica:not(.down)').length === 2")
        ask(page, "Which replica are you, and what have you seen of this text before?")
        page.wait_for_selector("#decisions td")
        shown = page.locator("#decisions tbody tr").first.inner_text()
        assert shown.count("cached)") == 2, shown
        urls_up = page.locator("#replica option").all_inner_texts()
        assert len(urls_up) == 2
        found = 0
        for url in urls_up:
            page.select_option("#replica", url)
            page.wait_for_timeout(3000)
            found += cached(page)
        assert found >= 16


def check_a_path_prefix_of_a_proxy(browser: Browser, urls: list[str]) -> None:
    with opened(browser, urls[0] + "/llm/") as page:
        live(page)
        ask(page, "Hello")


def check_ten_thousand_runs_are_drawn(browser: Browser, urls: list[str]) -> None:
    runs: list[list[Any]] = [["0", -1, 160, 160 * NUM_RUNS, 1, "reused", True, "", "root"]]
    sizes = [NUM_RUNS]
    for number in range(1, NUM_RUNS):
        parent = (number - 1) // 4
        runs.append(
            [f"{number}", parent, 160, 0, number % 2, ("in_use", "reused", "cached")[number % 3], False, "", "text"]
        )
        sizes.append(1)
    for number in range(NUM_RUNS - 1, 0, -1):
        sizes[runs[number][1]] += sizes[number]
        runs[number][3] = 160 * sizes[number]
    columns = ["id", "parent", "tokens", "subtree_tokens", "users", "state", "pinned", "tenant", "text"]
    answer = {
        "block_size": 16,
        "capacity_tokens": 1 << 22,
        "tokens": runs[0][3],
        "num_runs": NUM_RUNS,
        "columns": columns,
    }
    with opened(browser, urls[0]) as page:
        page.route("**/v1/cache/tree*", lambda route: route.fulfill(json=answer | {"runs": runs}))
        page.reload()
        live(page)
        page.click("summary:has-text('As a table')")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time, whatever else the machine does
        loads = "performance.getEntriesByName('tree-load').length"

        def script_ms() -> float:
            found = session.send("Performance.getMetrics")["metrics"]
            return next(1000 * one["value"] for one in found if one["name"] == "ScriptDuration")

        page.wait_for_function(f"() => {loads} > 2")
        before, first = script_ms(), page.evaluate(loads)
        page.wait_for_function(f"() => {loads} > 12")
        per_frame = (script_ms() - before) / (page.evaluate(loads) - first)
        print(json.dumps({"script_ms_of_a_frame": round(per_frame, 1)}), file=sys.stderr)
        parse = """(text) => [...Array(9)].map(() => {
            const begun = performance.now(); JSON.parse(text); return performance.now() - begun; })"""
        times = {"parse": page.evaluate(parse, json.dumps(answer | {"runs": runs}))}
        for name in ("tree-load", "tree-paint"):
            times[name] = page.evaluate(f"performance.getEntriesByName('{name}').map((entry) => entry.duration)")
        print(
            json.dumps({name: sorted(round(ms, 1) for ms in found) for name, found in times.items()}), file=sys.stderr
        )
        assert "largest" not in page.locator("#tree-summary").inner_text()  # nothing was left out


def check_nothing_serious_for_axe_and_no_overflow(browser: Browser, urls: list[str]) -> None:
    folder = Path(urls[3])
    for number in range(12):  # something to see
        for url in (urls[0], urls[2]):
            words = f"{SYSTEM} {'The river is long.' if number % 3 else ''} Where is book {number}?"
            post(url, "/v1/completions", {"prompt": words, "max_tokens": 8})
    post(urls[0], "/v1/prefixes", {"name": "page-test", "text": SYSTEM})
    for name, url in (("server", urls[0]), ("router", urls[2])):
        for width in (375, 1280, 3840):
            for scheme in ("light", "dark"):
                with opened(browser, url, width=width, scheme=scheme) as page:
                    live(page)
                    ask(page, "What is there to see?")
                    page.wait_for_timeout(1500)
                    page.screenshot(path=str(folder / f"{name}-{width}-{scheme}.png"), full_page=True)
                    over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                    assert over == 0, f"{name} {width}: {over} px too wide"
                    found = Axe().run(page).response["violations"]
                    serious = [
                        one["id"] + ": " + one["nodes"][0]["html"]
                        for one in found
                        if one["impact"] in ("serious", "critical")
                    ]
                    assert not serious, f"{name} {width} {scheme}: {serious}"


def main(urls: list[str]) -> None:
    checks: dict[str, Callable[[Browser, list[str]], None]] = {
        name: check for name, check in globals().items() if name.startswith("check_")
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, check in checks.items():
            error = None
            try:
                check(browser, urls)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            print(json.dumps({"check": name, "error": error}), flush=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
