"""`streamrl ui` without a browser: what is refused in a line, how samples are paged, whom it asks for the status."""

import html
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_cli.reporting.samples import SampleQuery, search
from streamrl_cli.ui import command, state
from streamrl_cli.ui.catalog import Catalog
from streamrl_cli.ui.pages import RunPages
from streamrl_pages.website import Asked
from support.command import streamrl
from support.hostile import foreign_folder, wall_line, write_lines
from support.sampled_runs import write_run

TOKEN = "a token of the tests"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    outcome = streamrl(capsys, "ui", *map(str, arguments))
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1), outcome
    return outcome.err[0]


def test_what_cannot_be_served_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a folder" in refusal(capsys, tmp_path / "absent")
    assert "needs --token-file" in refusal(capsys, tmp_path, "--host", "0.0.0.0")
    (tmp_path / "short").write_text("short\n")
    assert "at least 16 printable" in refusal(capsys, tmp_path, "--token-file", tmp_path / "short")
    (tmp_path / "odd").write_text("x" * 20 + "\ny")
    assert "at least 16 printable" in refusal(capsys, tmp_path, "--token-file", tmp_path / "odd")
    (tmp_path / "open").write_text("a token of many letters")
    (tmp_path / "open").chmod(0o644)
    assert "must not be for everybody to read" in refusal(capsys, tmp_path, "--token-file", tmp_path / "open")
    assert "absent" in refusal(capsys, tmp_path, "--token-file", tmp_path / "absent")


def test_a_missing_extra_is_a_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(capsys, tmp_path) == "streamrl ui: needs starlette; pip install 'streamrl[ui]'"


@pytest.mark.parametrize(
    ("host", "is_ours"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)]
)
def test_only_loopback_needs_no_token_file(host: str, is_ours: bool) -> None:
    if is_ours:
        assert len(command._token(None, host=host)) >= 16
    else:
        with pytest.raises(UserError, match="needs --token-file"):
            command._token(None, host=host)


# ---- samples


async def test_samples_are_paged_from_the_newest_and_none_is_missing(tmp_path: Path) -> None:
    run_dir = await write_run(tmp_path / "run")
    before, seen = None, []
    while True:
        found = search(run_dir, SampleQuery(), before=before, count=1)
        seen += [(sample.group.group_id, sample.sample.sample_index) for sample in found.samples]
        if (before := found.next_place) is None:
            break
    assert len(seen) == len(set(seen)) == 14
    assert {group for group, _ in seen} == set(range(7))
    assert [group for group, _ in seen][:4] == [5, 5, 4, 4], "what the journal still has comes first"


async def test_a_search_that_finds_nothing_says_how_far_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = await write_run(tmp_path / "run")
    monkeypatch.setattr("streamrl_cli.reporting.samples._MOST_LOOKED_AT", 3)
    found = search(run_dir, SampleQuery(text="nowhere"), before=None, count=20)
    assert (found.samples, found.looked_at) == ((), 3)
    rest = search(run_dir, SampleQuery(text="nowhere"), before=found.next_place, count=20)
    assert rest.looked_at == 3 and rest.next_place is not None
    assert search(run_dir, SampleQuery(text="nowhere"), before=rest.next_place, count=20).next_place is None


async def test_a_place_that_is_none_shows_the_newest(tmp_path: Path) -> None:
    run = await write_run(foreign_folder(tmp_path / "run", text="text"))
    pages = RunPages(Catalog(run))
    (key,) = Catalog(run).paths()
    for place in ("x", "1", "1.2.3", "-1.2", "9" * 30 + ".1", "１.２"):
        asked = Asked(parts={"run": key}, query={"before": place, "step": "x"})
        assert "step 2, group 5" in pages.html("/runs/{run}/samples", asked, state="")


async def test_failed_scores_of_all_steps_are_a_filter(tmp_path: Path) -> None:
    run = await write_run(foreign_folder(tmp_path / "run", text="text"))
    (key,) = Catalog(run).paths()
    asked = Asked(parts={"run": key}, query={"kind": "failed"})
    page = RunPages(Catalog(run)).html("/runs/{run}/samples", asked, state="")
    assert [f"group {group}, sample 1" in page for group in range(6)] == [False, True] * 3
    assert "sample 0" not in page and "<option selected>failed</option>" in page


async def test_a_text_is_looked_for_in_all_samples_of_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await write_run(foreign_folder(tmp_path / "run", text="text"))
    (key,) = Catalog(run).paths()
    asked = Asked(parts={"run": key}, query={"kind": "best", "text": "text 0"})
    monkeypatch.setattr("streamrl_cli.ui.pages._SAMPLES_SHOWN", 1)
    page = RunPages(Catalog(run)).html("/runs/{run}/samples", asked, state="")
    assert "step 2, group 4, sample 0" in page, "sample 1 is better, and has another text"
    assert "group 4, sample 1" not in page and "too much" not in page
    monkeypatch.setattr("streamrl_cli.reporting.samples._MOST_READ_BYTES", 1)
    asked = Asked(parts={"run": key}, query={"kind": "best", "text": "nowhere"})
    page = RunPages(Catalog(run)).html("/runs/{run}/samples", asked, state="")
    assert "in 1 groups it was not looked for, that is too much at once" in page


# ---- runs


def test_a_run_that_cannot_be_read_is_a_row_that_says_why(tmp_path: Path) -> None:
    foreign_folder(tmp_path / "good", text="text")
    foreign_folder(tmp_path / "bad", text="text")
    (tmp_path / "bad" / "job.json").write_text("{")
    (tmp_path / "link").symlink_to(tmp_path / "good")
    page = RunPages(Catalog(tmp_path)).html("/", Asked(parts={}, query={}), state="")
    assert page.count("<tr>") == 3
    assert "job.json" in page and 'class="fault"' in page


def test_all_runs_are_reached_page_by_page_and_chosen_ones_stay(tmp_path: Path) -> None:
    for number in range(45):
        os.utime(foreign_folder(tmp_path / f"run-{number:02}", text="text") / "run.json", (number, number))
    pages, keys = RunPages(Catalog(tmp_path)), list(Catalog(tmp_path).paths())

    def shown(**query: str) -> tuple[list[str], str]:
        page = pages.html("/", Asked(parts={}, query=query, chosen=chosen), state="")
        return re.findall(r'href="/runs/(\w+)"', page), page

    chosen: tuple[str, ...] = ()
    first, page = shown()
    assert (first, "45 runs" in page) == (keys[:20], True)
    links = [html.unescape(link) for link in re.findall(r'href="(/\?[^"]*)"', page)]
    assert links == ["/?page=2"]
    assert shown(page="2")[0] == keys[20:40]
    for last in ("3", "4", "999999999"):
        assert shown(page=last)[0] == keys[40:], last
    for none in ("0", "x", "-1", ""):
        assert shown(page=none)[0] == first, none
    chosen = (keys[0], keys[25], "gone")
    found, page = shown(page="2")
    assert found == [keys[0], *keys[20:40]]
    assert [key for key in keys if f'value="{key}" aria-label="draw this run" checked' in page] == [keys[0], keys[25]]
    assert f"/?page=3&run={keys[0]}&run={keys[25]}" in html.unescape(page)


@pytest.mark.parametrize("count", [0, 9])
def test_as_many_runs_are_compared_as_can_be_drawn(tmp_path: Path, count: int) -> None:
    for number in range(count):
        foreign_folder(tmp_path / f"run-{number}", text="text")
    catalog = Catalog(tmp_path)
    with pytest.raises(UserError, match=f"run: must name 1 to 8 runs.*{count}"):
        RunPages(catalog).html("/compare", Asked(parts={}, query={}, chosen=tuple(catalog.paths())), state="")


def test_a_run_is_not_reached_by_a_path(tmp_path: Path) -> None:
    foreign_folder(tmp_path / "runs" / "one", text="text")
    foreign_folder(tmp_path / "other", text="text")
    catalog = Catalog(tmp_path / "runs")
    for key in ("../other", "one", "", "other", "%2e%2e"):
        with pytest.raises(UserError, match="not here any more"):
            catalog.folder(key)


def test_a_page_says_when_its_run_has_changed(tmp_path: Path) -> None:
    run = foreign_folder(tmp_path / "run", text="text")
    pages = RunPages(Catalog(run), clock=lambda: 100.0)
    (key,) = Catalog(run).paths()
    asked = Asked(parts={"run": key}, query={})
    paths = [path for path in pages.shown if "{run}" in path]
    before = {path: pages.stamp(path, asked) for path in paths}
    write_lines(run / "metrics" / "text.jsonl", wall_line("text"), wall_line("text"))
    assert {path: pages.stamp(path, asked) for path in paths} == before
    (run / "result.json").write_text('{"status": "failed"}')
    assert all(pages.stamp(path, asked) != before[path] for path in paths)


# ---- the scheduler


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:80",
        "example.com:80",
        "localhost:80",
        "[2001:db8::1]:80",
        "",
        "127.0.0.1",
        "127.0.0.1:80/admin?x=",
        "127.0.0.1:80/:90",
        5,
        None,
    ],
)
def test_a_foreign_folder_sends_nobody_to_another_machine(
    address: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(state, "fetch_from", asked.append)
    folder = Catalog(foreign_folder(tmp_path / "run", text="text"))
    (key,) = folder.paths()
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "endpoints").mkdir()
    (tmp_path / "run" / "endpoints" / "scheduler.json").write_text(json.dumps({"signals": address}))
    assert state.read_status(folder.folder(key)) is None
    assert asked == []


Change = Callable[[dict], object]
STATUS = {
    "attempt": 1, "step": 3, "steps": 9, "queue": 0, "running": 4, "announced_step": 3, "checkpoint_step": None,
    "groups": {"scored": 2}, "trainer": None,
    "generators": [{"id": "g", "pool": "p", "slots": 8, "active": 2, "version": 2, "bubbles": {"busy": 1.0}, "wall_s": 2.0}],
    "dispatch": {"why": "no curve", "longest_first": False, "long_generators": [], "pools": {"p": {"speed": "known", "step_s": {"1": 0.01}}}},
}  # fmt: skip


def test_the_status_says_who_holds_which_version_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = foreign_folder(tmp_path / "run", text="text")
    (run / "result.json").unlink()
    (run / "endpoints").mkdir()
    (run / "endpoints" / "scheduler.json").write_text('{"signals": "127.0.0.1:1"}')
    monkeypatch.setattr(state, "fetch_from", lambda address: STATUS)
    pages = RunPages(Catalog(run))
    (key,) = Catalog(run).paths()
    page = pages.html("/runs/{run}/now", Asked(parts={"run": key}, query={}), state="")
    assert "<td>g</td><td>p</td><td>2</td><td>1</td><td>2 / 8</td><td>50%</td>" in page
    assert "no curve" in page and "1: 10 ms" in page
    monkeypatch.setattr(state, "fetch_from", lambda address: STATUS | {"step": "<b>"})
    assert "The scheduler says nothing" in pages.html("/runs/{run}/now", Asked(parts={"run": key}, query={}), state="")
