"""What `streamrl run` makes of things that cannot work: one clear line, exit code 2, nothing lost.

Job files alone are in tests/corpus; here are data sets, rewards, ports, folders, checkpoints and disks.
"""

import json
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamrl.spec import parse_job
from streamrl_cli.runner.workers import last_line
from streamrl_workers.tasks.dataset import open_dataset
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, streamrl

MIDDLE = 100
"""A train prompt that is not among the first that are asked for."""
STEPS = 40
"""Of a run that is stopped in its midst."""
Change = Callable[[dict[str, Any], Path], None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "prompts.jsonl")
    return tmp_path


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def refused(job: dict[str, Any], base: Path, *args: str) -> str:
    """Run a job that must be refused; returns the one line."""
    run = LocalRun.start(job, folder=base / "run", base_dir=base, args=args)
    assert run.wait_end() == 2, run.logs()
    out = (base / "run.out").read_text()
    assert "Traceback" not in out, out
    return last_line(base / "run.out")


def rewards(job: dict[str, Any], reward: dict[str, Any]) -> None:
    job["spec"]["task"]["rewards"] = [{"name": "answer", "timeoutSeconds": 60.0, **reward}]


def write_module(base: Path, body: str) -> None:
    (base / "mine.py").write_text(f"def score(*, prompt, completion, answer, metadata):\n    {body}\n")


def broken_line(job: dict[str, Any], base: Path) -> None:
    (base / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')


def lacking_field(job: dict[str, Any], base: Path) -> None:
    (base / "prompts.jsonl").write_text('{"question": "a", "answer": "b"}\n')


def empty_file(job: dict[str, Any], base: Path) -> None:
    (base / "prompts.jsonl").write_text("")


def not_text(job: dict[str, Any], base: Path) -> None:
    (base / "prompts.jsonl").write_bytes(b'{"prompt": "\xff\xfe", "answer": "b"}\n')


def half_a_character(job: dict[str, Any], base: Path) -> None:
    with (base / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "\\ud800 hello", "answer": "x"}\n')


def format_that_gives_half_a_character(job: dict[str, Any], base: Path, *, ending: str = "7") -> None:
    (base / "mine.py").write_text(
        "def texts(*, question, answer, metadata):\n"
        f"    half = question.endswith({ending!r})\n"
        "    return {'prompt': question + '\\ud800' * half, 'target': answer}\n"
    )
    job["spec"]["task"]["format"] = {"function": "mine:texts"}


def unknown_data_set(job: dict[str, Any], base: Path) -> None:
    job["spec"]["task"]["dataset"] = {"reasoningGym": {"name": "chain_som"}}


def unknown_parameter(job: dict[str, Any], base: Path) -> None:
    job["spec"]["task"]["dataset"] = {"reasoningGym": {"name": "chain_sum", "parameters": {"min_term": 2}}}


def module_that_fails(job: dict[str, Any], base: Path) -> None:
    write_module(base, "return 1.0")
    (base / "mine.py").write_text("import no_such_library\n" + (base / "mine.py").read_text())
    rewards(job, {"python": {"function": "mine:score"}})


def function_that_lacks(job: dict[str, Any], base: Path) -> None:
    write_module(base, "return 1.0")
    rewards(job, {"python": {"function": "mine:scores"}})


def reward_that_always_raises(job: dict[str, Any], base: Path) -> None:
    write_module(base, "raise KeyError('units')")
    rewards(job, {"python": {"function": "mine:score"}})


def reward_that_always_hangs(job: dict[str, Any], base: Path) -> None:
    write_module(base, "\n    while True: pass")
    rewards(job, {"timeoutSeconds": 0.3, "python": {"function": "mine:score"}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (broken_line, ["prompts.jsonl", "2"]),
        (lacking_field, ["prompt"]),
        (empty_file, ["prompts.jsonl"]),
        (not_text, ["prompts.jsonl", "UTF-8"]),
        (half_a_character, ["prompts.jsonl line 201", "UTF-8"]),
        (format_that_gives_half_a_character, ["prompt", "UTF-8", "ud800"]),
        (unknown_data_set, ["chain_som", "chain_sum"]),
        (unknown_parameter, ["min_term"]),
        (module_that_fails, ["mine", "no_such_library"]),
        (function_that_lacks, ["mine", "scores"]),
        (reward_that_always_raises, ["answer", "KeyError"]),
        (reward_that_always_hangs, ["answer", "0.3"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_task_that_cannot_work_is_one_line(*, change: Change, words: list[str], base: Path) -> None:
    job = simulated_job(steps=5)
    change(job, base)
    line = refused(job, base)
    for word in words:
        assert word in line, line


def test_a_format_that_is_mended_lets_the_run_go_on(base: Path) -> None:
    """The prompt that cannot be made is met in the middle: what was planned before it is neither lost nor planned again."""
    job = simulated_job(steps=40)
    spec = parse_job(job).spec
    later = open_dataset(spec.task, seed=spec.seed, base_dir=base).item("train", MIDDLE).prompt
    format_that_gives_half_a_character(job, base, ending=later)
    run = LocalRun.start(job, folder=base / "run", base_dir=base)
    assert run.wait_end() == 2, run.logs()
    assert run.result()["check"]["planned"] > 0
    run.assert_exact()
    (base / "mine.py").write_text(
        "def texts(*, question, answer, metadata):\n    return {'prompt': question, 'target': answer}\n"
    )
    run.resume()
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()


@pytest.mark.parametrize("flag", ["--grpc-port", "--signals-port"])
def test_a_port_in_use_is_named(*, flag: str, busy_port: int, base: Path) -> None:
    assert str(busy_port) in refused(simulated_job(), base, flag, str(busy_port))


def test_a_folder_in_use_is_kept(base: Path) -> None:
    (base / "run").mkdir()
    (base / "run" / "precious").write_text("x")
    assert "new or empty folder" in refused(simulated_job(), base)
    assert (base / "run" / "precious").read_text() == "x"


def test_a_mistake_found_after_the_start_leaves_the_folder_usable(base: Path) -> None:
    job = simulated_job(steps=1)
    job["spec"]["task"]["rewards"] = [{"name": "mine", "python": {"function": "broken:score"}}]
    (base / "broken.py").write_text(
        "import no_such_module\ndef score(*, prompt, completion, answer, metadata): return 1.0\n"
    )
    assert "no_such_module" in refused(job, base)
    (base / "broken.py").write_text(
        "def score(*, prompt, completion, answer, metadata): return float(len(completion))\n"
    )
    run = LocalRun.start(job, folder=base / "run", base_dir=base)
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()


def stopped_run(base: Path) -> LocalRun:
    """A run with two checkpoints, stopped by Ctrl-C."""
    job = simulated_job(steps=STEPS)
    hold = Hold.on(job, base, step=12)
    run = LocalRun.start(job, folder=base / "run", base_dir=base)
    run.wait_steps(12)
    assert run.interrupt() == 130, run.logs()
    hold.let_go()
    return run


def damage(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        file.write_bytes(b"\0")


def test_a_damaged_newest_checkpoint_costs_only_the_steps_behind_it(base: Path) -> None:
    run = stopped_run(base)
    damage(sorted((run.folder / "checkpoints").iterdir())[-1])
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == STEPS
    check = run.check()
    assert check.returncode == 0, check.stdout + check.stderr


def test_damaged_checkpoints_are_named_and_nothing_is_deleted(base: Path) -> None:
    run = stopped_run(base)
    kept = sorted((run.folder / "checkpoints").iterdir())
    for checkpoint in kept:
        damage(checkpoint)
    run.resume()
    assert run.wait_end() == 2, run.logs()
    assert "checkpoint" in last_line(base / "run.out")
    assert sorted((run.folder / "checkpoints").iterdir()) == kept


@pytest.mark.soak
def test_damaged_samples_are_refused_until_they_are_given_up(base: Path) -> None:
    run = stopped_run(base)
    with closing(sqlite3.connect(run.folder / "journal.sqlite", isolation_level=None)) as connection:
        key, data = connection.execute("SELECT max(key), data FROM trajectories").fetchone()
        connection.execute("UPDATE trajectories SET data = ? WHERE key = ?", (bytes([data[0] ^ 1]) + data[1:], key))
    assert run.check().returncode == 1
    run.resume()
    assert run.wait_end() == 2, run.logs()
    assert f"the samples of group {key >> 10} are not what was written" in last_line(base / "run.out")
    assert "`streamrl journal repair`" in last_line(base / "run.out")
    assert streamrl("journal", "repair", str(run.folder)).returncode == 0
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == STEPS
    run.assert_exact()


def test_a_lost_journal_is_refused(base: Path) -> None:
    run = stopped_run(base)
    (run.folder / "journal.sqlite").unlink()
    run.resume()
    assert run.wait_end() == 2, run.logs()
    assert "journal.sqlite: is missing, and this run had one" in last_line(base / "run.out")


def test_a_full_disk_ends_the_run_with_its_name_and_loses_nothing(base: Path) -> None:
    job = simulated_job(steps=100)
    job["spec"]["failurePolicy"]["maxRestarts"] = 1
    run = LocalRun.start(job, folder=base / "run", base_dir=base, file_size_limit_bytes=200_000)
    assert run.wait_end() in (1, 2), run.logs()
    assert "journal" in last_line(base / "run.out"), run.logs()
    stored = json.loads((run.folder / "job.json").read_text())
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert run.steps() == stored["spec"]["pipeline"]["steps"]
    assert run.check().returncode == 0


def test_a_resume_with_damaged_lines_of_steps_counts_by_the_journal(base: Path) -> None:
    job = simulated_job(steps=12)
    hold = Hold.on(job, base, step=6)
    run = LocalRun.start(job, folder=base / "run", base_dir=base)
    run.wait_steps(6)
    run.interrupt()
    hold.let_go()
    file = run.folder / "metrics" / "steps.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([b"\x00" * 40 + b"\n", *lines[4:]]))
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert "done: 12 steps in " in run.said()
    assert "warning: metrics/steps.jsonl has no line of 4 of the 12 steps: it was damaged" in run.said()
    run.assert_exact()
