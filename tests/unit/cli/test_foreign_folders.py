"""Run folders that somebody else made: they are data to `report`, `journal` and `generate`, and what they say goes nowhere else."""

import argparse
import base64
import ctypes
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.spec import parse_job
from streamrl_cli.main import COMMANDS, command_of
from streamrl_cli.reporting.data import read_run
from streamrl_cli.reporting.page import render
from streamrl_cli.runner import folder
from streamrl_cli.runner.folder import create_folder, hold
from support.command import Outcome, streamrl
from support.hostile import CONTROLS, MARKUP, Skeleton, foreign_folder, step_line, wall_line, write_json, write_lines
from support.jobs import simulated_job

SCENARIO = """
groupSize: 2
pipeline: {batchGroups: 2, steps: 2}
pools: [{name: p, slots: 2, latency: [{batch: 1, milliseconds: 10}]}]
lengths: {logNormal: {medianTokens: 20, sigma: 0.5}}
trainer: {secondsPerStep: 0.5}
"""
Break = Callable[[Path], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return foreign_folder(tmp_path / "run", text="text")


def report(run: Path, capsys: pytest.CaptureFixture[str]) -> Outcome:
    return streamrl(capsys, "report", str(run))


def assert_one_line(outcome: Outcome, *words: str) -> None:
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1), outcome
    assert all(word in outcome.err[0] for word in words), outcome.err


# ---- the page


def test_no_element_and_no_script_of_the_page_comes_from_the_folder(tmp_path: Path) -> None:
    tame, wild = (
        Skeleton(render(read_run(foreign_folder(tmp_path / name, text=text)), plotly_js="draw()"))
        for name, text in (("tame", "text"), ("wild", MARKUP))
    )
    assert wild.parts == tame.parts
    assert [script for script in wild.scripts if "type" not in script[0]] == [
        script for script in tame.scripts if "type" not in script[0]
    ]
    [figures] = [json.loads(source) for kind, source in wild.scripts if kind.get("type") == "application/json"]
    assert not re.search(r"[<>]", "".join(texts_of(figures)).replace("<br>", "")), "Plotly reads HTML in labels"


def texts_of(figures: object) -> list[str]:
    """All texts of the figures that came from the folder: not our templates for what hovers."""
    if isinstance(figures, dict):
        return [text for key, value in figures.items() if key != "hovertemplate" for text in texts_of(value)]
    if isinstance(figures, list):
        return [text for value in figures for text in texts_of(value)]
    return [figures] if isinstance(figures, str) else []


def test_the_page_lets_only_its_own_scripts_run(run: Path) -> None:
    page = Skeleton(render(read_run(run), plotly_js="draw('ü')"))
    metas = [dict(attrs) for tag, attrs in page.parts if tag == "meta"]
    [policy] = [found["content"] or "" for found in metas if found.get("http-equiv") == "Content-Security-Policy"]
    sources = [source for kind, source in page.scripts if "type" not in kind]
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy.startswith(f"default-src 'none'; script-src {allowed}; style-src")


def test_half_a_surrogate_pair_reaches_the_page_as_its_escape(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics" / "scaling.jsonl").write_text(
        '{"time_s": 1.0, "pool": "\\ud800", "from": 0, "to": 1, "reason": "\\udfff"}\n'
    )
    (run / "metrics" / os.fsdecode(b"\xff\xfe.jsonl")).write_text(json.dumps(wall_line("a")) + "\n")
    assert report(run, capsys).code == 0
    assert r"<td>\ud800</td>" in (run / "report.html").read_text()


def test_a_simulation_page_takes_no_markup_from_its_files_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skeletons = []
    for name in ("tame", MARKUP.replace("/", "\u2044")):
        scenario, page = tmp_path / f"{name}.yaml", tmp_path / "page.html"
        scenario.write_text(SCENARIO)
        assert streamrl(capsys, "simulate", str(scenario), "--plot", str(page)).code == 0
        skeletons.append(Skeleton(page.read_text()))
    assert skeletons[0].parts == skeletons[1].parts


# ---- writing


def test_a_link_in_the_place_of_the_report_is_replaced_and_not_followed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (run / "report.html").symlink_to(victim)
    assert report(run, capsys).code == 0
    assert victim.read_text() == "precious"
    assert not (run / "report.html").is_symlink()
    assert sorted(path.name for path in run.iterdir()) == [
        "job.json", "metrics", "report.html", "result.json", "run.json",
    ]  # fmt: skip


def test_a_directory_in_the_place_of_the_report_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").mkdir()
    assert_one_line(report(run, capsys), "report.html: cannot be written: Is a directory")
    assert not list(run.glob(".report*"))


def test_the_lock_of_a_run_is_no_link_to_another_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(UserError, match="cannot be written"), hold(tmp_path / "lock", run="r"):
        pass
    assert victim.read_text() == "precious"


# ---- reading


FILES = ("job.json", "run.json", "result.json", "metrics/steps.jsonl", "metrics/scaling.jsonl", "metrics/text.jsonl")


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_is_refused_at_once(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    assert_one_line(report(run, capsys), f"{run / name}: must be a regular file")


@pytest.mark.parametrize("name", [*FILES, "metrics"])
def test_a_link_in_the_folder_is_not_followed(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    assert_one_line(report(run, capsys), str(run / name), "" if name == "metrics" else "must not be a symbolic link")


def test_the_folder_itself_may_be_a_link(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latest").symlink_to(run)
    assert report(tmp_path / "latest", capsys).code == 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("journal", "check", "{run}"), "job.json"),
        (("journal", "check", "{run}"), "store.json"),
        (("generate", "--prompt", "x", "--checkpoint", "{run}"), "job.json"),
        (("run", "--resume", "{run}"), "run.json"),
    ],
)
def test_no_command_waits_for_a_fifo_of_a_run_folder(
    arguments: tuple[str, ...], name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    outcome = streamrl(capsys, *(argument.format(run=run) for argument in arguments))
    assert (outcome.code, len(outcome.err)) == (2, 1), outcome


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("job.json", b'{"a": "\xff"}', "job.json:1: must be UTF-8"),
        ("job.json", b'{"a": ' + b"9" * 5000 + b"}", "job.json: is not JSON: Exceeds the limit (4300 digits)"),
        ("job.json", b"[" * 100_000, "job.json: is not JSON: it is nested too deep"),
        ("run.json", b"{}", "run.json: must be an object with a text base_dir"),
        ("run.json", b'{"base_dir": 7}', "run.json: must be an object with a text base_dir"),
        ("run.json", b"[]", "run.json: must be an object with a text base_dir"),
        ("result.json", b"{}", "result.json: must be an object with a text status"),
        ("result.json", b'"succeeded"', "result.json: must be an object with a text status"),
        ("metrics/steps.jsonl", b'{"step": 0}\n', "steps.jsonl: reward_mean: field required"),
        ("metrics/text.jsonl", b'{"step": 0}\n', "text.jsonl: t: field required"),
        ("metrics/steps.jsonl", b"x" * 2**21, "steps.jsonl:1: a line must be at most 1048576 bytes"),
    ],
)
def test_a_broken_file_is_one_line(
    name: str, data: bytes, words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_bytes(data)
    assert_one_line(report(run, capsys), words)


def test_a_file_of_a_terabyte_is_refused_unread(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "metrics" / "steps.jsonl", 2**40)
    assert_one_line(report(run, capsys), "steps.jsonl: must be at most 1024 MiB")


ODD = (None, True, -1, 10**30, 1e300, "x", "\ud800", [], {}, [[]], {"a": {}}, {"busy": "x"}, {"odd": 1})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("steps", step_line(0, "a")),
        ("evaluations", {"step": 0, "mean_reward": 0.5}),
        ("scaling", {"time_s": 1.0, "pool": "a", "from": 0, "to": 1, "reason": "r"}),
        ("odd", wall_line("a")),
    ],
)
def test_any_field_may_hold_anything(
    name: str, line: dict[str, object], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report, or one line."""
    for field in line:
        for value in ODD:
            write_lines(run / "metrics" / f"{name}.jsonl", line, line | {field: value})
            outcome = report(run, capsys)
            assert (outcome.code, len(outcome.err)) in ((0, 0), (2, 1)), (field, value, outcome)


# ---- resuming: such a folder is code


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    return create_folder(parse_job(simulated_job()), base_dir=tmp_path / "code", parent=tmp_path / "runs").path


def point_to(run: Path, directory: str) -> None:
    write_json(run / "run.json", {"base_dir": directory, "created_s": 1.0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: point_to(run, "."), "base_dir must be a directory that exists, by its absolute path, got '.'"),
        (lambda run: point_to(run, "/no/such\x00"), "base_dir must be a directory that exists"),
        (lambda run: point_to(run, str(run)), "base_dir must not lie in the run folder"),
        (lambda run: point_to(run, f"{run}/metrics/.."), "base_dir must not lie in the run folder"),
    ],
)
def test_code_of_an_odd_place_is_not_run(
    change: Break, words: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(made)
    assert_one_line(streamrl(capsys, "run", "--resume", str(made)), words)


def test_code_that_another_users_folder_names_is_not_run(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(made / "run.json", 4711, 4711)
    else:  # only root can give a file away
        monkeypatch.setattr(folder, "owner_of_new_files", lambda _: 4711)
    outcome = streamrl(capsys, "run", "--resume", str(made))
    assert_one_line(outcome, "belongs to another user", "this command runs the code that it names")


def test_a_file_system_that_gives_files_to_another_user_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does with root's, and shares that are mapped to one user."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with tempfile.TemporaryDirectory() as parent, made_files_are(65534, below=parent):
        code = Path(parent, "code")
        code.mkdir()
        made = create_folder(parse_job(simulated_job()), base_dir=code, parent=Path(parent, "runs"))
        assert made.file("run.json").stat().st_uid == (os.getuid() or 65534)
        folder.open_code(made.path)


@contextmanager
def made_files_are(uid: int, *, below: str) -> Iterator[None]:
    """Files that root makes are another's, to whom alone its rights to files belong; another user's are that user's anyway."""
    if os.getuid() != 0:
        yield
        return
    os.chown(below, uid, uid)
    libc = ctypes.CDLL(None)
    libc.setfsuid(uid)
    try:
        yield
    finally:
        libc.setfsuid(0)


def test_what_is_resumed_is_said_before_it_runs(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(made / "result.json", {"status": "succeeded"})
    outcome = streamrl(capsys, "run", "--resume", str(made))
    assert (outcome.code, outcome.out[0]) == (0, f"code: {made.parent.parent / 'code'}")


def folder_commands() -> set[str]:
    """Every command that takes a run folder, as its parser says."""
    found = set()
    for name in COMMANDS:
        _, parser = command_of(name)
        for path, action in _arguments(parser, name):
            if "RUN" in str(action.metavar) or "run folder" in str(action.help):
                of_run = name == "run" and action.option_strings  # the others of its flags are no folders
                found.add(f"{path} {action.option_strings[0]}" if of_run else path)
    return found - {"run --run-dir"}  # a folder that is made


def _arguments(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:  # argparse lists them nowhere else
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _arguments(inner, f"{path} {name}")
        else:
            yield path, action


def security_rows() -> list[set[str]]:
    """Commands of the page's two rows of run folders: where one is code, and where it is data."""
    rows = re.findall(r"^\| a run folder(?:, in)? \|?(.*)$", Path("SECURITY.md").read_text(), re.MULTILINE)
    return [set(re.findall(r"`([a-z][^`.]*)`", row)) for row in rows]


def test_every_command_that_takes_a_run_folder_is_on_the_page_as_code_or_as_data() -> None:
    code, data = security_rows()
    assert code == {"run --resume", "replay"}
    assert (code | data, code & data) == (folder_commands(), set())


@pytest.mark.parametrize("command", sorted(security_rows()[0]))
def test_a_command_that_runs_a_folders_code_says_so_or_refuses_it(
    command: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(made / "result.json", {"status": "succeeded"})
    outcome = streamrl(capsys, *command.split(), str(made))
    assert outcome.out[0] == f"code: {made.parent.parent / 'code'}"
    point_to(made, ".")
    assert_one_line(streamrl(capsys, *command.split(), str(made)), "base_dir must be a directory that exists")


# ---- what reaches the terminal


def test_errors_about_a_folder_carry_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = foreign_folder(tmp_path / CONTROLS, text=CONTROLS)
    for name in FILES[:3]:
        (run / name).write_text("{")
        outcome = report(run, capsys)
        assert outcome.code == 2
        assert "".join(outcome.err).isprintable()
