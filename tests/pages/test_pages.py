"""`streamrl ui` in Chromium: what somebody hostile wrote, who is let in, what is live, and for whom it can be used."""

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import expect

from pages.conftest import DEADLINE_S, TOKEN, Visit, serving
from support.hostile import CONTROLS, MARKUP, foreign_folder, step_line, write_lines
from support.sampled_runs import write_run

HOSTILE = f"{MARKUP}<a href=javascript:document.title='run'>x</a>{CONTROLS}\0\ud800\u2066[x](javascript:alert(1))"
PAGES = ("", "/timeline", "/samples", "/now", "/events")


def run_folder(path: Path, *, text: str, samples: str) -> Path:
    """A run folder with these texts, made in a thread: the browser's own loop runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, write_run(foreign_folder(path, text=text), text=samples)).result(DEADLINE_S)


@pytest.fixture
def tame(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "tame", text="text", samples="text").parent


@pytest.fixture
def base(tame: Path) -> Iterator[str]:
    with serving(tame) as address:
        yield address


# ---- what somebody hostile wrote


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run whose every text, and whose name, is hostile."""
    parent = tmp_path_factory.mktemp("runs")
    name = HOSTILE.replace("/", "\u2044").replace("\0", "")[:60].encode(errors="replace") + b"\xff"
    run_folder(parent / os.fsdecode(name), text=HOSTILE, samples=HOSTILE.replace("\ud800", ""))
    return parent


@pytest.mark.parametrize("tail", [None, *PAGES, "compare"])
def test_nothing_of_a_hostile_run_is_run_or_fetched(
    tail: str | None, hostile: Path, visit: Callable[..., Visit]
) -> None:
    with serving(hostile) as base:
        seen = visit(base)
        run = seen.run()
        if tail == "compare":
            seen.go(f"/compare?run={run.rpartition('/')[2]}")
        elif tail is not None:
            seen.go(run + tail)
        page = seen.page
        assert page.title() != "run" and "StreamRL" in page.title()
        assert page.evaluate("document.querySelectorAll('img, main b ~ b, iframe, object, [onerror]').length") == 0
        links = page.evaluate("[...document.querySelectorAll('a')].map((one) => one.href)")
        assert all(link.startswith(base) for link in links)
        assert page.evaluate(
            "[...document.scripts].every((one) => one.src ? one.src.startsWith(location.origin) : one.type === 'application/json')"
        )
        text = page.evaluate("document.body.innerText + document.title")
        assert not set(text) & set("\x1b\x07\x08\x7f\x9b\u202e\u2066\0")
        assert seen.is_clean()


def test_a_hostile_completion_is_shown_as_it_is(hostile: Path, visit: Callable[..., Visit]) -> None:
    with serving(hostile) as base:
        seen = visit(base)
        shown = seen.go(seen.run() + "/samples").locator("pre").first.inner_text()
        assert "</script></title><script>document.title='run'</script>" in shown
        assert "\\x1b[31m" in shown and "\\u202e" in shown and "javascript:alert(1)" in shown


# ---- who is let in


def answer(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_without_the_token_there_is_no_data(base: str, visit: Callable[..., Visit]) -> None:
    run = visit(base).run()
    for path in ("/", "/compare?run=x", *(run + tail for tail in PAGES), f"/changes{run}", "/session", "/nothing"):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Cookie": "streamrl=x"},
            {"Authorization": f"Basic {TOKEN}"},
        ):
            code, text = answer(base + path, **headers)
            assert code == 401 and "tame" not in text, path
    assert answer(base + run, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_the_cookie_is_for_no_script_and_no_other_site(base: str, visit: Callable[..., Visit]) -> None:
    seen = visit(base)
    (cookie,) = seen.page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]
    assert seen.page.evaluate("document.cookie") == ""
    assert "token" not in seen.page.url


def test_a_wrong_token_is_said(base: str, browser) -> None:
    page = browser.new_page()
    page.goto(base)
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    page.locator("#told", has_text="not the token").wait_for(timeout=DEADLINE_S * 1000)
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.locator("h1", has_text="Runs").wait_for(timeout=DEADLINE_S * 1000)
    page.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1", "a@127.0.0.1.x"]
)
def test_a_name_that_is_not_the_servers_is_refused(base: str, host: str) -> None:
    code, text = answer(base + "/", Host=host, Authorization=f"Bearer {TOKEN}")
    assert code == 421 and "tame" not in text


def test_nothing_can_be_changed(base: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        request = urllib.request.Request(base + "/", method=method, headers={"Authorization": f"Bearer {TOKEN}"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=DEADLINE_S)
        assert refused.value.code == 405
        refused.value.close()


# ---- live


def test_a_page_follows_its_run(tame: Path, base: str, visit: Callable[..., Visit]) -> None:
    seen = visit(base)
    page = seen.go(seen.run())
    steps = page.locator(".card", has_text="steps").locator("b")
    assert steps.inner_text().startswith("2 /")
    page.evaluate("window.same = true")
    write_lines(tame / "tame" / "metrics" / "steps.jsonl", *map(step_line, range(5), ["text"] * 5))
    expect(steps).to_contain_text("5 /", timeout=DEADLINE_S * 1000)
    assert page.evaluate("window.same") is True, "the page was not loaded anew"
    assert page.evaluate("document.querySelector('#f0').data[0].x.length") == 5
    assert seen.is_clean()


def test_a_new_run_comes_into_the_list(tame: Path, base: str, visit: Callable[..., Visit]) -> None:
    page = visit(base).go("/")
    foreign_folder(tame / "second", text="text")
    page.locator("td a", has_text="second").wait_for()


def test_a_run_without_steps_is_said_until_it_has_some(tame: Path, base: str, visit: Callable[..., Visit]) -> None:
    steps, evaluations = (tame / "tame" / "metrics" / f"{name}.jsonl" for name in ("steps", "evaluations"))
    evaluations.unlink()
    lines = steps.read_text()
    steps.unlink()
    seen = visit(base)
    page = seen.go(seen.run())
    expect(page.locator("main pre")).to_contain_text("has no steps to report yet")
    steps.write_text(lines)
    page.locator("#f0 .main-svg").first.wait_for()
    expect(page.locator(".card", has_text="steps").locator("b")).to_contain_text("2 /")


# ---- samples


def test_samples_are_found_by_text_step_and_kind(base: str, visit: Callable[..., Visit]) -> None:
    seen = visit(base)
    page = seen.go(seen.run() + "/samples")
    assert page.locator(".sample").count() > 4
    page.keyboard.press("/")
    page.keyboard.type("TEXT 1")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=TEXT+1**")
    shown = page.locator(".sample pre").all_inner_texts()
    assert shown and page.locator(".sample summary").all_inner_texts() and "text 0" not in shown
    page.goto(f"{page.url.split('?')[0]}?step=0&kind=longest")
    titles = page.locator(".sample summary").all_inner_texts()
    assert titles[0] == "longest: step 0, group 1, sample 0" and all("step 0" in title for title in titles)
    page.goto(f"{page.url.split('?')[0]}?kind=dropped")
    assert all("dropped (zero_variance)" in title for title in page.locator(".sample summary").all_inner_texts())
    page.goto(f"{page.url.split('?')[0]}?text=nowhere")
    assert page.get_by_text("None here.").count() == 1


# ---- for whom it can be used


def test_keys_reach_every_page(base: str, visit: Callable[..., Visit]) -> None:
    seen = visit(base)
    run = seen.run()
    page = seen.go(run)
    for number, tail in enumerate(PAGES, start=1):
        with page.expect_navigation(url=base + run + tail):  # the first is where we are
            page.keyboard.press(str(number))
    page.keyboard.press("3")
    page.wait_for_url("**/samples")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.closest('.sample') === document.querySelectorAll('.sample')[1]")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelectorAll('.sample')[0].open") is False
    page.keyboard.press("r")
    page.wait_for_url(base + "/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_the_timeline_is_zoomed_by_keys_and_by_dragging(tame: Path, base: str, visit: Callable[..., Visit]) -> None:
    lines = [
        {"t": 100.0 + at, "instance": "a", "wall_s": float(at), "parts": {"busy": at / 2, "other": at / 2}}
        for at in range(1, 4000)
    ]
    write_lines(tame / "tame" / "metrics" / "text.jsonl", *lines)
    seen = visit(base)
    page = seen.go(seen.run() + "/timeline")
    width = "(() => { const x = document.querySelector('#f0').data[0].x; return x[x.length - 1] - x[0]; })()"
    whole = page.evaluate(width)
    page.keyboard.press("+")
    page.wait_for_url("**from=**")
    page.locator("#f0 .main-svg").first.wait_for()
    assert page.evaluate(width) < 0.6 * whole
    box = page.locator("#f0 .nsewdrag").bounding_box()
    before = page.url
    page.mouse.move(box["x"] + 50, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 20, steps=5)
    page.mouse.up()
    page.wait_for_url(lambda url: url != before)
    page.locator("#f0 .main-svg").first.wait_for()
    assert page.evaluate(width) < 0.2 * whole
    page.keyboard.press("0")
    page.wait_for_url("**/timeline?")
    assert seen.is_clean()


@pytest.mark.parametrize("tail", [None, *PAGES])
def test_a_phone_scrolls_no_page_sideways(tail: str | None, hostile: Path, visit: Callable[..., Visit]) -> None:
    with serving(hostile) as base:
        seen = visit(base, viewport={"width": 360, "height": 740})
        run = seen.run()
        page = seen.go(run + tail) if tail is not None else seen.page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_dark_pages_are_dark_and_can_be_read(base: str, visit: Callable[..., Visit]) -> None:
    seen = visit(base, color_scheme="dark")
    page = seen.go(seen.run())
    light = "(element, name) => getComputedStyle(element)[name].match(/\\d+/g).slice(0, 3).reduce((sum, one) => sum + Number(one), 0)"
    assert page.evaluate(f"({light})(document.body, 'backgroundColor')") < 150
    assert page.evaluate(f"({light})(document.body, 'color')") > 550
    assert page.evaluate(f"({light})(document.querySelector('#f0 .xtick text'), 'fill')") > 550
    page.emulate_media(color_scheme="light")
    expect(page.locator("#f0 .xtick text").first).to_have_css("fill", "rgb(31, 41, 51)", timeout=DEADLINE_S * 1000)
