"""The dispatcher and `streamrl explain`."""

import errno
import sys
from types import ModuleType

import pytest

from streamrl import __version__
from streamrl.spec.schema import children, job_schema, schema_at
from streamrl_cli.main import COMMANDS
from support.command import streamrl


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "--help")
    assert outcome.code == 0
    assert [name for name in COMMANDS if not any(line.split()[:1] == [name] for line in outcome.out)] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert streamrl(capsys, "--version").out == [f"streamrl {__version__}"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("valdate",), "streamrl valdate: is not a command; did you mean validate?"),
        (
            ("validate",),
            "streamrl validate: the following arguments are required: FILE; see `streamrl validate --help`",
        ),
        (
            ("validate", "--odd", "f"),
            "streamrl validate: unrecognized arguments: --odd; see `streamrl validate --help`",
        ),
        (("explain", "spec.piplin"), "spec.piplin: is not a known field; did you mean pipeline?"),
        (("explain", "spec.pipeline.steps.x"), "spec.pipeline.steps.x: is not a known field"),
        (
            ("explain", "spec.trainer.pod.nodeName"),
            "spec.trainer.pod.nodeName: is refused: the cluster's scheduler places the pods; use nodeSelector",
        ),
        (("explain", "odd"), "odd: is not a known field; known: apiVersion, kind, metadata, spec"),
    ],
)
def test_a_users_mistake_is_one_line_and_2(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = streamrl(capsys, *arguments)
    assert (outcome.code, outcome.err) == (2, [line])


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 2, ["runs/a: No space left on device"]),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2, ["system: Address already in use"]),
        (KeyboardInterrupt(), 130, []),
    ],
)
def test_failures_of_the_system_have_no_traceback(
    error: BaseException,
    code: int,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = streamrl_with_failing_report(error, capsys, monkeypatch)
    assert (outcome.code, outcome.err) == (code, lines)


def test_our_own_mistakes_are_not_hidden(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        streamrl_with_failing_report(KeyError("x"), capsys, monkeypatch)


def streamrl_with_failing_report(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail(_args: object) -> int:
        raise error

    command = ModuleType("streamrl_cli.reporting.report")
    command.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    command.run = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "streamrl_cli.reporting.report", command)
    return streamrl(capsys, "report")


def test_explain_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert streamrl(capsys, "explain", "spec.scheduling.leaseSeconds").out == [
        "spec.scheduling.leaseSeconds <number>",
        "  A generator silent for so long is dead; its samples are issued again.",
        "  Value:    a number from 1 to 3600",
        "  Default:  15.0",
        "  Unit:     seconds",
        "  Change:   never",
    ]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("generators[0].pod.image", "always"),
        ("generators.engine.hf.slots", "while the job is suspended"),
        ("trainer.pod", "while the job is suspended"),
        ("storage.checkpoints.size", "never"),
    ],
)
def test_explain_says_when_a_field_may_change(field: str, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"  Change:   {change}" in streamrl(capsys, "explain", f"spec.{field}").out


@pytest.mark.parametrize(
    "path", ["rljob.spec.generators.engine", "spec.generators[0].engine", "spec.generators.engine."]
)
def test_explain_takes_every_way_to_write_a_path(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "explain", path)
    assert "  Rule:     needs exactly one of hf, simulated, vllm" in outcome.out
    assert "  hf <object>" in outcome.out


def test_explain_says_the_rules_of_the_items_of_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert any("Rule:     devices Trainer needs" in line for line in streamrl(capsys, "explain", "spec.generators").out)
    assert "  Rule:     names of generators must differ" in streamrl(capsys, "explain", "spec").out


def all_paths(path: str = "") -> list[str]:
    fields = children(schema_at(path) or {})
    below = [f"{path}.{name}".removeprefix(".") for name in fields]
    return below + [deeper for inner in below for deeper in all_paths(inner)]


def test_every_field_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    paths = all_paths()
    assert len(paths) > 100
    for path in ["", *paths]:
        outcome = streamrl(capsys, "explain", path)
        assert outcome.code == 0
        assert (outcome.out[1].strip() or path) in f"{job_schema()}" or len(outcome.out[1]) > 60
