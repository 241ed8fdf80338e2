"""The parts of the ranker's process that need no model: its budget, its pairs, its rounds, its folders."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.spec.scheduling import RankerSpec as RankerChoice
from streamrl_workers.ranker.folder import FOLDER_FILE, HEAD_FILE, check_ranker
from streamrl_workers.ranker.pairs import FILE, MEMORY_PAIRS, PairStore, standardised
from streamrl_workers.ranker.tuning import BATCH_PROMPTS, PASSES, CpuBudget, TunedModels, Tuner

# ---- budget


@given(
    percent=st.integers(1, 100),
    work=st.lists(st.tuples(st.floats(0.001, 2.0), st.floats(0.0, 5.0)), min_size=1, max_size=60),
)
def test_the_budget_holds_over_any_time(percent: int, work: list[tuple[float, float]]) -> None:
    """`work`: CPU seconds of a piece, and seconds for which there is nothing to do behind it."""
    wall, cpu = [0.0], [7.0]
    budget = CpuBudget(percent, wall_s=lambda: wall[0], cpu_s=lambda: cpu[0])
    share, longest, times = percent / 100, max(cost for cost, _ in work), []
    for cost, idle_s in work:
        while (wait_s := budget.wait_s()) > 1e-9:
            wall[0] += wait_s
        times.append((wall[0], cpu[0]))
        wall[0] += cost  # a full core, as long as it runs
        cpu[0] += cost
        wall[0] += idle_s
    for began, (wall_s, cpu_s) in enumerate(times):
        for ended_s, used_s in times[began:]:
            assert used_s - cpu_s <= share * (ended_s - wall_s) + longest + 1e-6


def test_a_budget_that_is_free_does_not_wait() -> None:
    budget = CpuBudget(20, wall_s=lambda: 3.0, cpu_s=lambda: 1.0)
    assert budget.wait_s() == 0


# ---- pairs and rounds


class Learns:
    """Remembers what it was taught."""

    def __init__(self) -> None:
        self.rounds: list[list[tuple[str, float]]] = []

    def tuning(
        self, examples: Sequence[tuple[str, float]], *, passes: int, batch_prompts: int, seed: int
    ) -> Iterator[None]:
        self.rounds.append(list(examples))
        for _ in range(passes * -(-len(examples) // batch_prompts)):
            yield

    def save(self, path: Path) -> None:
        """Nothing to keep."""


def tuner_over(store: PairStore, folder: Path, *, refit_pairs: int) -> tuple[Tuner, Learns]:
    model, models = Learns(), TunedModels(folder / "models", origin="a")
    budget = CpuBudget(100, wall_s=lambda: 0.0, cpu_s=lambda: 0.0)
    return Tuner(model, store=store, models=models, budget=budget, refit_pairs=refit_pairs, rounds=0), model


def run_round(tuner: Tuner) -> int:
    """Mini-batches of one round, and the call that ends it."""
    done, steps = tuner.rounds, 0
    while tuner.rounds == done:
        tuner.step()
        steps += 1
    return steps


def given_pairs(first: int, count: int) -> list[tuple[str, float]]:
    return [(f"prompt {n}", float(n)) for n in range(first, first + count)]


def test_a_round_begins_with_enough_new_pairs_and_mixes_old_ones_in(tmp_path: Path) -> None:
    store = PairStore(tmp_path)
    tuner, model = tuner_over(store, tmp_path, refit_pairs=40)
    store.add(given_pairs(0, 39))
    assert not tuner.due
    assert tuner.wait_s() is None
    store.add(given_pairs(39, 1))
    assert tuner.due
    assert tuner.wait_s() == 0
    assert run_round(tuner) == PASSES * 40 / BATCH_PROMPTS + 1
    assert [prompt for prompt, _ in model.rounds[0]] == [prompt for prompt, _ in given_pairs(0, 40)]
    assert not tuner.due
    store.add(given_pairs(100, 40))
    run_round(tuner)
    second = [prompt for prompt, _ in model.rounds[1]]
    assert second[:40] == [prompt for prompt, _ in given_pairs(100, 40)]
    assert set(second[40:]) == {prompt for prompt, _ in given_pairs(0, 40)}
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["model-2"]


def test_lengths_that_have_grown_are_not_mixed_with_old_ones_as_numbers(tmp_path: Path) -> None:
    """An old pair keeps the target that it had among its own."""
    store = PairStore(tmp_path)
    tuner, model = tuner_over(store, tmp_path, refit_pairs=32)
    store.add(given_pairs(1, 32))
    run_round(tuner)
    first = dict(model.rounds[0])
    store.add([(f"later {n}", 1000.0 * n) for n in range(1, 33)])
    run_round(tuner)
    second = dict(model.rounds[1])
    assert {prompt: second[prompt] for prompt in first} == first
    assert sum(second[prompt] for prompt in second if prompt.startswith("later")) == pytest.approx(0, abs=1e-9)


def test_where_tuning_cannot_keep_up_a_round_stays_short(tmp_path: Path) -> None:
    store = PairStore(tmp_path)
    tuner, model = tuner_over(store, tmp_path, refit_pairs=16)
    store.add(given_pairs(0, 500))
    run_round(tuner)
    assert [prompt for prompt, _ in model.rounds[0]] == [f"prompt {n}" for n in range(468, 500)]
    assert not tuner.due, "the others are old now"
    assert len(store.old()) == 500


def test_pairs_survive_a_kill_and_a_half_written_line(tmp_path: Path) -> None:
    store = PairStore(tmp_path)
    tuner, _ = tuner_over(store, tmp_path, refit_pairs=16)
    store.add(given_pairs(0, 16))
    run_round(tuner)
    store.add(given_pairs(16, 5))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"prompt": "cut o')
    again = PairStore(tmp_path)
    assert [pair.prompt for pair in again.old()] == [prompt for prompt, _ in given_pairs(0, 16)]
    assert [pair.prompt for pair in again.new()] == [prompt for prompt, _ in given_pairs(16, 5)]


def test_pairs_and_their_file_are_bounded(tmp_path: Path) -> None:
    store = PairStore(tmp_path)
    for first in range(0, 3 * MEMORY_PAIRS, 512):
        store.add([("x" * 20, float(n)) for n in range(first, first + 512)])
    assert len(store) == MEMORY_PAIRS
    assert len((tmp_path / FILE).read_text().splitlines()) <= 2 * MEMORY_PAIRS


@given(tokens=st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_targets_keep_the_order_of_lengths(tokens: list[float]) -> None:
    targets = standardised(tokens)
    ordered = [target for _, target in sorted(zip(tokens, targets, strict=True))]
    assert ordered == sorted(ordered)
    assert sum(targets) == pytest.approx(0, abs=1e-5)


# ---- models


def test_the_newest_whole_model_of_this_ranker_counts(tmp_path: Path) -> None:
    models = TunedModels(tmp_path, origin="a")
    assert models.newest() is None
    for rounds in (1, 2, 10):
        models.save(rounds, lambda path, rounds=rounds: (path / "weights").write_text(str(rounds)) and None)
    again = TunedModels(tmp_path, origin="a")
    assert again.newest() == (10, tmp_path / "model-10")
    assert [path.name for path in tmp_path.iterdir()] == ["model-10"], "older ones are gone"
    assert TunedModels(tmp_path, origin="b").newest() is None


def test_a_model_that_was_cut_off_leaves_the_last_one(tmp_path: Path) -> None:
    models = TunedModels(tmp_path, origin="a")
    models.save(1, lambda path: None)

    def fails(path: Path) -> None:
        (path / "weights").write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        models.save(2, fails)
    again = TunedModels(tmp_path, origin="a")
    assert again.newest() == (1, tmp_path / "model-1")
    assert [path.name for path in tmp_path.iterdir()] == ["model-1"]


# ---- folders


def fitted(path: Path) -> Path:
    path.mkdir()
    (path / FOLDER_FILE).write_text("{}")
    for name in ("config.json", "tokenizer.json", "model.safetensors", HEAD_FILE):
        (path / name).write_text("{}")
    return path


def test_a_job_may_name_a_folder(tmp_path: Path) -> None:
    fitted(tmp_path / "lm")
    check_ranker(RankerChoice.model_validate({"languageModel": {"path": "lm"}}), base_dir=tmp_path)
    check_ranker(RankerChoice.model_validate({"hashing": {}}), base_dir=tmp_path)
    check_ranker(None, base_dir=tmp_path)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda path: (path / FOLDER_FILE).unlink(), "must hold ranker.json"),
        (lambda path: (path / HEAD_FILE).unlink(), "must hold head.safetensors"),
        (lambda path: (path / "config.json").unlink(), "must hold config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "must hold *.safetensors"),
        (lambda path: (path / "tokenizer.json").unlink(), "must hold tokenizer*"),
    ],
)
def test_a_bad_folder_is_one_line(tmp_path: Path, spoil: object, line: str) -> None:
    assert callable(spoil)
    path = fitted(tmp_path / "lm")
    spoil(path)
    with pytest.raises(UserError) as caught:
        check_ranker(RankerChoice.model_validate({"languageModel": {"path": "lm"}}), base_dir=tmp_path)
    assert str(caught.value).startswith(f"spec.scheduling.ranker.languageModel.path: {line}")
    assert "\n" not in str(caught.value)


def test_folders_that_have_no_name_of_ours_stay(tmp_path):
    names = ["model-²", "model-007", "model-old", "notes"]
    for name in names:
        (tmp_path / name).mkdir()
    models = TunedModels(tmp_path, origin="a")
    models.save(1, lambda _: None)
    models.save(2, lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model-2", *names])
