"""`streamrl samples`: what is picked, what is said of it, and run folders that somebody else made."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_cli.reporting.data import read_run
from streamrl_cli.reporting.page import render
from streamrl_cli.reporting.samples import ShownSample
from streamrl_workers.stream.archive import segment_path
from support.command import Outcome, streamrl
from support.hostile import ACTS, CONTROLS, MARKUP, Skeleton, foreign_folder
from support.sampled_runs import write_run


def samples(capsys: pytest.CaptureFixture[str], run_dir: Path, *flags: str) -> Outcome:
    return streamrl(capsys, "samples", str(run_dir), *flags)


def shown(outcome: Outcome) -> list[str]:
    """The titles."""
    assert (outcome.code, outcome.err) == (0, []), outcome
    return [line for line in outcome.out if line and not line.startswith(" ")]


async def test_the_newest_step_is_shown_by_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = samples(capsys, await write_run(tmp_path / "run"))
    best, worst, longest = "group 4, sample 1", "group 5, sample 0", "group 5, sample 0"
    titles = shown(outcome)
    assert titles[0].startswith("best") and titles[0].endswith(f": step 2, {best}")
    assert titles[1].startswith("worst, longest") and titles[1].endswith(f": step 2, {worst}")
    assert longest == worst
    at = outcome.out.index(titles[1])
    assert outcome.out[at + 1 : at + 6] == [
        "  reward 0 (style 0, text 0), advantage +0.5, 12 tokens, ended by stop, version 2, by text in 0.5 s",
        "  prompt     | text?",
        "  completion | text 0",
        "  environment| wrong",
        "  completion | more",
    ]


async def test_old_steps_and_dropped_groups_come_from_the_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = await write_run(tmp_path / "run")
    assert shown(samples(capsys, run_dir, "--step", "0", "--longest", "--count", "2")) == [
        "longest: step 0, group 1, sample 0",
        "longest: step 0, group 0, sample 1",
    ]
    assert shown(samples(capsys, run_dir, "--dropped", "--worst")) == [
        "worst: dropped (zero_variance), group 6, sample 0"
    ]
    assert len(shown(samples(capsys, run_dir, "--random", "--count", "9"))) == 4
    assert shown(samples(capsys, run_dir, "--group", "3")) == [f"step 1, group 3, sample {index}" for index in range(2)]


async def test_all_samples_of_all_steps_are_rows_of_a_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of one turn: `completion` is its text."""
    rows = [json.loads(line) for line in samples(capsys, await write_run(tmp_path / "run"), "--all", "--json").out]
    assert [(row["step"], row["group"], row["sample"]) for row in rows] == [
        (group // 2, group, index) for group in range(6) for index in range(2)
    ]
    assert all("completion" not in row for row in rows if len(row["turns"]) != 1)
    assert [row["completion"] for row in rows if len(row["turns"]) == 1] == [
        row["turns"][0] for row in rows if len(row["turns"]) == 1
    ]


async def test_json_has_all_of_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = samples(capsys, await write_run(tmp_path / "run"), "--group", "1", "--json")
    first, second = map(json.loads, outcome.out)
    assert first["tokens"] == list(range(12))
    assert first["logprobs"] == [-0.5] * 12
    assert (first["prompt"], first["turns"], first["observations"]) == ("text?", ["text 0", "more"], ["wrong"])
    assert (first["reward"], first["reward_parts"], first["advantage"]) == (0.0, {"text": 0.0, "style": 0.0}, 0.5)
    assert (second["reward"], second["reward_error"], second["advantage"]) == (None, "text", None)
    assert second["spans"] == [{"tokens": 4, "attempt": 1, "step": 0}]


async def test_failed_scores_of_all_steps_and_dropped_groups_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = await write_run(tmp_path / "run")
    titles = shown(samples(capsys, run_dir, "--kind", "failed", "--count", "9"))
    assert titles == [f"failed: step {group // 2}, group {group}, sample 1" for group in (5, 3, 1)]
    assert shown(samples(capsys, run_dir, "--failed", "--step", "0")) == ["failed: step 0, group 1, sample 1"]


async def test_the_reference_answer_and_the_metadata_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = await write_run(foreign_folder(tmp_path / "run", text="text"))
    assert samples(capsys, run_dir, "--group", "1").out[6:8] == ["  reference  | 42", '  metadata   | {"level": 1}']
    row = json.loads(samples(capsys, run_dir, "--group", "1", "--json").out[0])
    assert (row["answer"], row["metadata"]) == ("42", {"level": 1})
    assert '<h3>metadata</h3><pre dir="auto">{&#34;level&#34;: 1}</pre>' in render(read_run(run_dir), plotly_js="")


def test_the_prompt_of_a_later_context_is_named_so() -> None:
    written = pb.SampleTexts(turns=["a", "b", "c"], observations=["more", "sum up"], contexts=[1])
    segments = [(1, False, False), (2, True, False), (1, False, False), (4, True, True), (1, False, False)]
    sample = pb.Sample(tokens=bytes(36), finish_reason="stop", reward=1.0)
    for tokens, observation, context in segments:
        sample.segments.add(tokens=tokens, observation=observation, context=context)
    found = ShownSample(kinds=(), group=pb.ArchivedGroup(), sample=sample, prompt="p", written=written)
    names = ["prompt", "completion", "environment", "completion", "new prompt", "completion"]
    assert [name for name, _ in found.texts()] == names
    assert "5 tokens, ended by stop" in found.facts()
    assert (found.document()["contexts"], found.document()["segments"][3]["context"]) == ([1], True)


def test_a_turn_drawn_anew_says_why_it_has_no_reward() -> None:
    found = ShownSample(
        kinds=(), group=pb.ArchivedGroup(), sample=pb.Sample(resampled=True), prompt="p", written=pb.SampleTexts()
    )
    assert "no reward (a turn drawn anew)" in found.facts()
    assert found.document()["resampled"] is True


async def test_long_texts_are_cut_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await write_run(tmp_path / "run", text="x" * 1000)
    assert "    201 more characters: --full" in [line[11:] for line in samples(capsys, run_dir, "--best").out]
    assert f"  prompt     | {'x' * 1000}?" in samples(capsys, run_dir, "--best", "--full").out


async def test_what_is_not_there_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await write_run(tmp_path / "run")
    for flags, words in (
        (["--step", "7"], "step 7: has no samples; there are samples of steps 0 to 2"),
        (["--group", "7"], "group 7: has no samples in this run folder"),
        (["--count", "0"], "--count: must be at least 1"),
    ):
        outcome = samples(capsys, run_dir, *flags)
        assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1)
        assert outcome.err[0].startswith(words)


async def test_without_an_archive_the_newest_steps_are_there_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = await write_run(tmp_path / "run", share_percent=0)
    outcome = samples(capsys, run_dir, "--best")
    assert outcome.out[0] == "best: step 2, group 4, sample 1"
    assert outcome.err == [
        "storage.archive is off (sharePercent: 0): only the newest steps have samples, without texts"
    ]
    assert samples(capsys, run_dir, "--step", "0").code == 2
    assert samples(capsys, run_dir, "--dropped").err == [
        "--dropped: finds none; no dropped group of this run has samples"
    ]


# ---- of others


async def test_nothing_of_a_sample_acts_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await write_run(tmp_path / "run", text=CONTROLS)
    for flags in ((), ("--json",), ("--group", "1")):
        outcome = samples(capsys, run_dir, *flags)
        assert outcome.code == 0
        assert not any(ACTS.search(line) for line in [*outcome.out, *outcome.err])


def damage(run_dir: Path) -> None:
    path = segment_path(run_dir / "archive", 0)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(run_dir: Path) -> None:
    path = segment_path(run_dir / "archive", 0)
    path.write_bytes(path.read_bytes()[:-20])


def link(run_dir: Path) -> None:
    path = segment_path(run_dir / "archive", 0)
    path.symlink_to(path.rename(run_dir.parent / "elsewhere"))


def link_folder(run_dir: Path) -> None:
    folder = run_dir / "archive"
    folder.symlink_to(folder.rename(run_dir.parent / "folder"))


async def test_a_journal_of_another_run_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = await write_run(tmp_path / "run")
    journal = run_dir / "journal.sqlite"
    journal.symlink_to(journal.rename(tmp_path / "other.sqlite"))
    outcome = samples(capsys, run_dir)
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1), outcome
    assert "journal.sqlite: must not be a symbolic link" in outcome.err[0]


@pytest.mark.parametrize("change", [damage, cut, link, link_folder])
async def test_an_archive_that_is_not_what_was_written_is_refused_in_a_line(
    change: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = await write_run(tmp_path / "run")
    change(run_dir)
    outcome = samples(capsys, run_dir, "--group", "3")
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1), outcome
    assert "segment-00000000: " in outcome.err[0]


# ---- in the report


async def report(path: Path, *, text: str) -> str:
    """The page of a run folder whose every text is `text`."""
    return render(read_run(await write_run(foreign_folder(path, text=text), text=text)), plotly_js="draw()")


async def test_the_page_has_samples_of_the_newest_step(tmp_path: Path) -> None:
    page = await report(tmp_path / "run", text="text")
    assert "step 2, group 4, sample 1</summary>" in page
    assert "reward 0 (style 0, text 0), advantage +0.5, 12 tokens, ended by stop" in page
    assert '<h3>completion</h3><pre dir="auto">text 1</pre><h3>environment</h3><pre dir="auto">wrong</pre>' in page


async def test_nothing_of_the_page_comes_from_a_sample(tmp_path: Path) -> None:
    tame, wild = [
        Skeleton(await report(tmp_path / name, text=text)) for name, text in (("tame", "t"), ("wild", MARKUP))
    ]
    assert wild.parts == tame.parts
    assert [script for script in wild.scripts if "type" not in script[0]] == [
        script for script in tame.scripts if "type" not in script[0]
    ]


async def test_a_damaged_archive_costs_the_page_its_samples_alone(tmp_path: Path) -> None:
    run_dir = await write_run(foreign_folder(tmp_path / "run", text="text"))
    cut(run_dir)
    page = render(read_run(run_dir), plotly_js="draw()")
    assert "segment-00000000: is damaged: it is cut off" in page
    assert "<details class=" not in page
