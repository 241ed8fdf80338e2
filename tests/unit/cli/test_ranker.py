"""`streamrl ranker`: pairs to a ranker, and how good it is; every mistake is one line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli import ranker
from streamrl_cli.ranker import PromptLength, is_held_out, read_pairs
from support.command import Outcome, streamrl


def rank(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Outcome:
    return streamrl(capsys, "ranker", *map(str, arguments))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"w{number}", "tokens": number}) for number in range(200)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return tmp_path / "pairs.jsonl"


class Knows:
    """A model that has learnt its pairs by heart."""

    def scores(self, prompts: Sequence[str]) -> list[float]:
        return [float(prompt[1:]) for prompt in prompts]

    def save(self, path: Path) -> None:
        (path / "saved").touch()

    @classmethod
    def fitted(cls, known: Sequence[PromptLength], **options: Any) -> "Knows":
        assert set(options) == {"model", "passes", "learning_rate", "batch_prompts", "seed"}
        return cls()

    @classmethod
    def load(cls, path: Path, *, field: str) -> "Knows":
        return cls()


def test_fit_and_eval(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranker, "model_class", lambda field: Knows)
    monkeypatch.setattr(ranker, "check_folder", lambda path, field: None)
    folder = tmp_path / "ranker"
    fitted = rank(capsys, "fit", pairs, "--out", folder, "--model", "m")
    held_out = sum(is_held_out(pair.prompt) for pair in read_pairs(pairs))
    assert fitted.code == 0
    assert (folder / "saved").exists()
    assert fitted.out[0] == f"{folder}: learnt from {200 - held_out} prompts"
    judged = rank(capsys, "eval", folder, pairs)
    assert judged.out == fitted.out[1:], "fit says what eval says of the same held-out prompts"
    assert judged.out[0] == f"prompts           {held_out} (held out)"
    assert judged.out[1].startswith("recall 20 %       1.00 (95 %: at least ")
    assert judged.out[2] == "rank correlation  1.00"
    assert rank(capsys, "eval", folder, pairs, "--all").out[0] == "prompts           200 (all)"


def test_lines_with_one_prompt_count_as_their_mean(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "tokens": 1}\n\n{"prompt": "b", "tokens": 5, "x": 0}\n{"prompt": "a", "tokens": 2}\n'
    )
    assert read_pairs(path) == [PromptLength(prompt="a", tokens=1.5), PromptLength(prompt="b", tokens=5.0)]


def test_one_prompt_in_five_is_held_out_whatever_the_file() -> None:
    share = sum(is_held_out(str(number)) for number in range(5_000)) / 5_000
    assert 0.18 < share < 0.22


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "{path}: cannot be read: No such file or directory"),
        ("", "{path}: must hold at least one line"),
        ("\n{", "{path} line 2: must be JSON: "),
        ("[]", "{path} line 1: must be an object, got []"),
        ('{"tokens": 1}', "{path} line 1: prompt must be a text that is not empty"),
        ('{"prompt": "", "tokens": 1}', "{path} line 1: prompt must be a text that is not empty"),
        ('{"prompt": "\\ud800", "tokens": 1}', "{path} line 1: prompt must be UTF-8, which cannot carry half"),
        ('{"prompt": "a"}', "{path} line 1: tokens must be a number of at least 0"),
        ('{"prompt": "a", "tokens": -1}', "{path} line 1: tokens must be a number of at least 0, got -1"),
        ('{"prompt": "a", "tokens": true}', "{path} line 1: tokens must be a number of at least 0, got true"),
        ('{"prompt": "a", "tokens": NaN}', "{path} line 1: tokens must be a number of at least 0, got nan"),
    ],
)
def test_bad_pairs_are_one_line(
    content: str | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    outcome = rank(capsys, "fit", path, "--out", tmp_path / "out", "--model", "m")
    assert (outcome.code, len(outcome.err)) == (2, 1)
    assert outcome.err[0].startswith(line.format(path=path))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "streamrl ranker: the following arguments are required: fit|eval"),
        (("fit", "PAIRS", "--out", "o"), "streamrl ranker fit: the following arguments are required: --model"),
        (("fit", "PAIRS", "--out", "o", "--model", "m", "--passes", "0"), "--passes: must be at least 1, got 0"),
        (("fit", "PAIRS", "--out", "o", "--model", "m", "--learning-rate", "0"), "--learning-rate: must be above 0"),
        (("fit", "PAIRS", "--out", "PAIRS", "--model", "m"), "--out: must be a folder, got "),
        (("fit", "PAIRS", "--out", "o", "--model", "."), "--model: "),
        (("eval", "PAIRS", "PAIRS"), "FOLDER: must be a folder that `streamrl ranker fit` wrote"),
        (("eval", ".", "PAIRS"), "FOLDER: must hold ranker.json"),
    ],
)
def test_a_users_mistake_is_one_line(
    arguments: tuple[str, ...],
    line: str,
    pairs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = rank(capsys, *(str(pairs) if argument == "PAIRS" else argument for argument in arguments))
    assert (outcome.code, len(outcome.err)) == (2, 1)
    assert outcome.err[0].startswith(line)
    assert not (tmp_path / "o").exists()


def test_too_few_held_out_prompts_cannot_be_judged(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranker, "model_class", lambda field: Knows)
    monkeypatch.setattr(ranker, "check_folder", lambda path, field: None)
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(pairs.read_text().splitlines()[:20]))
    outcome = rank(capsys, "eval", tmp_path, few)
    assert (outcome.code, len(outcome.err)) == (2, 1)
    assert "must have at least 20 held-out prompts" in outcome.err[0]
    assert rank(capsys, "eval", tmp_path, few, "--all").code == 0
