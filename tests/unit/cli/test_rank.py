"""`streamrl rank`: pairs to a ranker, a ranker to scores, scores to a job; every mistake is one line."""

import json
from pathlib import Path
from random import Random

import pytest

from streamrl.spec.scheduling import Ranker as RankerChoice
from streamrl_cli import main
from streamrl_cli.rank.pairs import Pair, is_held_out, read_pairs, read_prompts, write_pairs
from streamrl_workers.scheduler.lengths.rankers.files import open_ranker
from support.command import Outcome, streamrl


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "rank", "fit, apply and judge a predictor of completion lengths")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """400 prompts; the answer's length follows from how many numbers are to be sorted."""
    draw = Random(0)
    sizes = [draw.randint(1, 40) for _ in range(400)]
    write_pairs(
        tmp_path / "pairs.jsonl",
        [
            Pair(
                prompt=f"Sort: {', '.join(str(draw.randint(0, 99)) for _ in range(size))}",
                tokens=10.0 * size * draw.lognormvariate(0, 0.1),
            )
            for size in sizes
        ],
    )
    return tmp_path / "pairs.jsonl"


def rank(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Outcome:
    return streamrl(capsys, "rank", *map(str, arguments))


def test_fit_eval_score_and_start_a_job(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ranker.json"
    fitted = rank(capsys, "fit", pairs, "--out", file, "--passes", "4")
    held_out = sum(is_held_out(pair.prompt) for pair in read_pairs(pairs))
    assert fitted.code == 0
    assert fitted.out[0] == f"{file}: hashing, learnt from {400 - held_out} prompts"

    judged = rank(capsys, "eval", file, pairs)
    assert judged.out == fitted.out[1:], "fit says what eval says of the same held-out prompts"
    assert judged.out[0] == f"prompts           {held_out} (held out)"
    assert [line.split("%")[0] for line in judged.out[1:4]] == ["recall 20 ", "recall 10 ", "recall  5 "]
    assert float(judged.out[1].split()[3]) >= 0.7
    assert rank(capsys, "eval", file, pairs, "--all").out[0] == "prompts           400 (all)"

    scored = rank(capsys, "score", file, pairs)
    scores = [float(line.split()[0]) for line in scored.out]
    assert len(scores) == 400
    assert scores == sorted(scores, reverse=True)

    table = tmp_path / "scores.json"
    assert rank(capsys, "score", file, pairs, "--out", table).out == [f"{table}: scores of 400 prompts"]
    light = open_ranker(RankerChoice.model_validate({"hashing": {"path": "ranker.json"}}), base_dir=tmp_path)
    known = open_ranker(RankerChoice.model_validate({"scores": {"path": "scores.json"}}), base_dir=tmp_path)
    assert light is not None
    assert known is not None
    prompt = read_prompts(pairs)[7]
    assert known.score(prompt) == light.score(prompt) is not None
    assert known.score("never seen") is None
    assert rank(capsys, "eval", table, pairs).out == judged.out, "a table can be judged as well"


def test_the_same_pairs_and_seed_give_the_same_file(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert rank(capsys, "fit", pairs, "--out", tmp_path / name, "--seed", seed, "--passes", "2").code == 0
    contents = [(tmp_path / name).read_text() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_lines_with_one_prompt_count_as_their_mean(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "tokens": 1}\n\n{"prompt": "b", "tokens": 5, "x": 0}\n{"prompt": "a", "tokens": 2}\n'
    )
    assert read_pairs(path) == [Pair(prompt="a", tokens=1.5), Pair(prompt="b", tokens=5.0)]
    assert read_prompts(path) == ["a", "b"]


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
    outcome = rank(capsys, "fit", path, "--out", tmp_path / "out")
    assert (outcome.code, len(outcome.err)) == (2, 1)
    assert outcome.err[0].startswith(line.format(path=path))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "streamrl rank: the following arguments are required: pairs|fit|eval|score"),
        (("fit", "PAIRS"), "streamrl rank fit: the following arguments are required: --out"),
        (
            ("fit", "PAIRS", "--out", "o", "--ranker", "odd"),
            "streamrl rank fit: argument --ranker: invalid choice: 'odd'",
        ),
        (("fit", "PAIRS", "--out", "o", "--passes", "0"), "--passes: must be at least 1, got 0"),
        (("fit", "PAIRS", "--out", "o", "--model", "m"), "--model: has no meaning for the ranker hashing"),
        (("fit", "PAIRS", "--out", "o", "--learning-rate", "1e-3"), "--learning-rate: is for languageModel alone"),
        (("fit", "PAIRS", "--out", "o", "--ranker", "languageModel"), "--model: must name a transformers model"),
        (("fit", "PAIRS", "--out", "o", "--ranker", "policyFeatures"), "--model: must name a transformers model"),
        (("eval", "PAIRS", "PAIRS"), "FILE: must be a JSON object that `streamrl rank` wrote"),
        (
            ("eval", ".", "PAIRS"),
            "FILE: must be a folder that `rank fit` wrote (languageModel, policyFeatures), got '.'",
        ),
        (("score", "nothing", "PAIRS"), "FILE: cannot be read: No such file or directory"),
        (("pairs", ".", "PAIRS", "--out", "o", "--samples", "0"), "--samples: must be at least 1, got 0"),
        (("pairs", ".", "PAIRS", "--out", "o", "--temperature", "-1"), "--temperature: must be at least 0, got -1.0"),
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


def test_too_few_held_out_prompts_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = tmp_path / "few.jsonl", tmp_path / "ranker.json"
    path.write_text("".join(json.dumps({"prompt": str(number), "tokens": number}) + "\n" for number in range(20)))
    assert len(rank(capsys, "fit", path, "--out", file, "--all").out) == 1, "nothing was held out"
    outcome = rank(capsys, "eval", file, path)
    assert (outcome.code, len(outcome.err)) == (2, 1)
    assert "must have at least 20 held-out prompts" in outcome.err[0]
    assert rank(capsys, "eval", file, path, "--all").code == 0
