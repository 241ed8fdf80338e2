"""Commands of the texts work: what `streamrl` takes, what CI runs, and for the rest a reason in `not_run.yaml`.

A command that nobody runs rots unseen: each is parsed by the command line itself, is run by CI, or stands with its reason in the list.
"""

import argparse
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from streamrl.errors import UserError
from streamrl_cli.jobfile import apply_overrides
from streamrl_cli.main import COMMANDS, command_of, main
from support.pages import Page, guides, pages
from support.tree import ROOT

NOT_RUN: dict[str, str] = YAML(typ="safe").load((ROOT / "tests/docs/not_run.yaml").read_text(encoding="utf-8"))
"""Beginning of a command -> why nobody runs it, or which test runs its like."""
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
EVERYBODYS = {"cat", "cd", "cp", "grep", "head", "jq", "ls", "mkdir", "openssl", "source", "tail"}
"""Programs of any machine, with nothing of ours but files, which are looked for."""
CRDS = [YAML(typ="safe").load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "crds").glob("*.yaml"))]
KINDS = {
    name
    for crd in CRDS
    for names in [crd["spec"]["names"]]
    for name in (names["plural"], names["singular"], *names.get("shortNames", []), crd["metadata"]["name"])
}
OUR_KINDS = re.compile(r"^((?:rl|generatorpool)[a-z.]*)(?:/|$)")
OUR_FOLDERS = re.compile(r"^(?:examples|helm|benchmarks|tools|tests|docs)/[\w./-]*$")
ALL_COMMANDS = [(page, line, words) for page in pages() for line, words in page.commands]


def _id(value: object) -> str | None:
    if isinstance(value, Page):
        return value.name
    return " ".join(value)[:60] if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("page", "line", "words"), ALL_COMMANDS, ids=_id)
def test_a_command_is_run_or_has_a_reason(page: Page, line: int, words: list[str]) -> None:
    where = f"{page.name}:{line}: {' '.join(words)}"
    assert [word for word in words if OUR_FOLDERS.match(word) and not (ROOT / word).exists()] == [], where
    if words[0] == "streamrl":
        _parse(words, where=where)
        return
    if words[0] == "make":
        assert words[1] in TARGETS, f"{where}: the Makefile has no such target"
    if words[0] == "helm":
        assert list(_unknown_values(words)) == [], f"{where}: no such value of the chart"
    if words[0] == "kubectl":
        named = {kind for word in words[2:] if (found := OUR_KINDS.match(word)) for kind in [found[1]]}
        assert named <= KINDS, f"{where}: no such kind"
    assert words[0] in EVERYBODYS or _in_ci(words) or _reason(words), (
        f"{where}: no step of .ci/run; add it to tests/docs/not_run.yaml with a reason"
    )


def _in_ci(words: list[str]) -> bool:
    """Whether a step of CI begins so; some are run beside others, or in another folder."""
    steps = re.sub(r"make -C \S+ ", "make ", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    return re.search(rf"^\s*(?:step )?{re.escape(' '.join(words[:2]))}(?:\s|$)", steps, re.MULTILINE) is not None


def _parse(words: list[str], *, where: str) -> None:
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set" and words[at + 1] != "PATH=VALUE"]
    job = next((word for word in words if word.startswith("examples/")), "examples/chain-sum.yaml")
    try:
        command_of(words[1])[1].parse_args(words[2:])
        apply_overrides(YAML(typ="safe").load((ROOT / job).read_text(encoding="utf-8")), overrides)
    except UserError as error:
        pytest.fail(f"{where}: {error}")


def _unknown_values(words: list[str]) -> Iterator[str]:
    """Keys of `--set` that the chart's values do not have."""
    chart = next((word for word in words if word.startswith("helm/")), None)
    if chart is None:
        return
    values = YAML(typ="safe").load((ROOT / chart / "values.yaml").read_text(encoding="utf-8"))
    given = [words[at + 1] for at, word in enumerate(words) if word.startswith("--set")]
    for pair in (pair for text in given for pair in re.split(r",(?=[\w.]+=)", text)):
        have: Any = values
        for part in pair.partition("=")[0].split("."):
            if not isinstance(have, dict) or part not in have:
                yield pair
                break
            have = have[part]


def _reason(words: list[str]) -> str | None:
    return next((why for start, why in NOT_RUN.items() if _begins(" ".join(words), start)), None)


def _begins(text: str, start: str) -> bool:
    return text.startswith(start) if start.endswith("/") else f"{text} ".startswith(f"{start} ")


def test_every_reason_is_needed_and_names_tests_that_exist() -> None:
    texts = [" ".join(words) for _, _, words in ALL_COMMANDS]
    assert [start for start in NOT_RUN if not any(_begins(text, start) for text in texts)] == []
    named = [name for why in NOT_RUN.values() for name in re.findall(r"tests/[\w/]+\.py", why)]
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.name)
def test_commands_in_lines_have_known_names_and_flags(page: Page) -> None:
    """`streamrl run --resume` in the middle of a sentence: arguments may be missing there, wrong ones may not stand."""
    if page.name == "CHANGELOG.md":
        return  # it tells of commands that are gone, too
    wrong = [
        f"{page.name}:{line}: {span}"
        for line, span in page.spans
        if span.startswith("streamrl ") and not _is_known(span.split()[1:])
    ]
    assert wrong == []


def test_fields_that_explain_is_asked_for_exist(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        span
        for page in guides()
        for _, span in page.spans
        if span.startswith("streamrl explain ") and span.split()[2].islower()
    }
    assert len(asked) > 3
    assert [span for span in sorted(asked) if main(span.split()[1:])] == []
    capsys.readouterr()


def _is_known(words: list[str]) -> bool:
    names = [name for name in re.split(r"[|,]", words[0]) if name.isidentifier()]
    if not names or any(name not in COMMANDS for name in names):
        return words[0] in ("COMMAND", "--version")
    flags = {re.split(r"[=\]]", word.lstrip("["))[0] for word in words[1:] if word.lstrip("[").startswith("--")}
    return all(flags <= set(_flags(command_of(name)[1])) for name in names)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _flags(inner)


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.name)
def test_targets_in_lines_are_in_the_makefile(page: Page) -> None:
    named = {
        target for _, span in page.spans for target in re.findall(r"^make (?:[A-Z_]+=\S+ )*([a-z][a-z0-9-]*)", span)
    }
    assert named <= TARGETS


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.name)
def test_extras_of_the_package_exist(page: Page) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for text in re.findall(r"streamrl\[([\w,]+)\]", page.text) for extra in text.split(",")}
    assert named <= set(project["optional-dependencies"])
