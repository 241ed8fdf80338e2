"""The parts of the ranker's process that need no model: its budget, its pairs, its rounds, its folders."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.spec.scheduling import Ranker as RankerChoice
from streamrl_workers.ranker.budget import BURST_S, CpuBudget
from streamrl_workers.ranker.folders import FOLDER_FILE, HEAD_FILE, SOLUTION_FILE, check_folder
from streamrl_workers.ranker.pairs import FILE, MEMORY_PAIRS, PairStore, standardised
from streamrl_workers.ranker.protocol import Opening, ProcessNumbers, answer, numbers_of, scores_of
from streamrl_workers.ranker.state import ModelState
from streamrl_workers.ranker.tuner import BATCH_PROMPTS, PASSES, Tuner
from streamrl_workers.scheduler.lengths.rankers import AnsweredRanker
from streamrl_workers.scheduler.lengths.rankers.files import open_ranker

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
            assert used_s - cpu_s <= share * (ended_s - wall_s + BURST_S) + longest + 1e-6


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


def tuner_over(store: PairStore, *, refit_pairs: int, rounds: int = 0) -> tuple[Tuner, Learns, list[int]]:
    model, saved = Learns(), []
    return Tuner(model, store=store, refit_pairs=refit_pairs, rounds=rounds, save=saved.append), model, saved


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
    store = PairStore(tmp_path, first=tmp_path)
    tuner, model, saved = tuner_over(store, refit_pairs=40)
    store.add(given_pairs(0, 39))
    assert not tuner.due
    store.add(given_pairs(39, 1))
    assert tuner.due
    assert run_round(tuner) == PASSES * 40 / BATCH_PROMPTS + 1
    assert [prompt for prompt, _ in model.rounds[0]] == [prompt for prompt, _ in given_pairs(0, 40)]
    assert not tuner.due
    store.add(given_pairs(100, 40))
    run_round(tuner)
    second = [prompt for prompt, _ in model.rounds[1]]
    assert second[:40] == [prompt for prompt, _ in given_pairs(100, 40)]
    assert set(second[40:]) == {prompt for prompt, _ in given_pairs(0, 40)}
    assert saved == [1, 2]


def test_lengths_that_have_grown_are_not_mixed_with_old_ones_as_numbers(tmp_path: Path) -> None:
    """An old pair keeps the target that it had among its own."""
    store = PairStore(tmp_path, first=tmp_path)
    tuner, model, _ = tuner_over(store, refit_pairs=32)
    store.add(given_pairs(1, 32))
    run_round(tuner)
    first = dict(model.rounds[0])
    store.add([(f"later {n}", 1000.0 * n) for n in range(1, 33)])
    run_round(tuner)
    second = dict(model.rounds[1])
    assert {prompt: second[prompt] for prompt in first} == first
    assert sum(second[prompt] for prompt in second if prompt.startswith("later")) == pytest.approx(0, abs=1e-9)


def test_where_tuning_cannot_keep_up_a_round_stays_short(tmp_path: Path) -> None:
    store = PairStore(tmp_path, first=tmp_path)
    tuner, model, _ = tuner_over(store, refit_pairs=16)
    store.add(given_pairs(0, 500))
    run_round(tuner)
    assert [prompt for prompt, _ in model.rounds[0]] == [f"prompt {n}" for n in range(468, 500)]
    assert not tuner.due, "the others are old now"
    assert len(store.old()) == 500


def test_pairs_survive_a_kill_and_a_half_written_line(tmp_path: Path) -> None:
    store = PairStore(tmp_path, first=tmp_path)
    tuner, _, _ = tuner_over(store, refit_pairs=16)
    store.add(given_pairs(0, 16))
    run_round(tuner)
    store.add(given_pairs(16, 5))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"prompt": "cut o')
    again = PairStore(tmp_path, first=tmp_path)
    assert [pair.prompt for pair in again.old()] == [prompt for prompt, _ in given_pairs(0, 16)]
    assert [pair.prompt for pair in again.new()] == [prompt for prompt, _ in given_pairs(16, 5)]


def test_the_first_pairs_are_those_that_the_folder_was_fitted_on(tmp_path: Path) -> None:
    fitted, run = tmp_path / "fitted", tmp_path / "run"
    fitted.mkdir()
    run.mkdir()
    PairStore(fitted, first=fitted).add(given_pairs(0, 3))
    assert len(PairStore(run, first=fitted)) == 3


def test_pairs_and_their_file_are_bounded(tmp_path: Path) -> None:
    store = PairStore(tmp_path, first=tmp_path)
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


# ---- state


def test_the_newest_whole_model_of_this_ranker_counts(tmp_path: Path) -> None:
    state = ModelState(tmp_path, origin="a")
    assert state.newest() is None
    for rounds in (1, 2, 10):
        state.save(rounds, lambda path, rounds=rounds: (path / "weights").write_text(str(rounds)) and None)
    again = ModelState(tmp_path, origin="a")
    assert again.newest() == (10, tmp_path / "model-10")
    assert [path.name for path in tmp_path.iterdir()] == ["model-10"], "older ones are gone"
    assert ModelState(tmp_path, origin="b").newest() is None


def test_a_model_that_was_cut_off_leaves_the_last_one(tmp_path: Path) -> None:
    state = ModelState(tmp_path, origin="a")
    state.save(1, lambda path: None)

    def fails(path: Path) -> None:
        (path / "weights").write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        state.save(2, fails)
    again = ModelState(tmp_path, origin="a")
    assert again.newest() == (1, tmp_path / "model-1")
    assert [path.name for path in tmp_path.iterdir()] == ["model-1"]


# ---- frames


def test_frames_come_back_as_they_went() -> None:
    opening = Opening(ranker="languageModel", path="p", field="f", state_dir="s", cpu_percent=5, refit_pairs=16)
    assert Opening.of(json.loads(json.dumps(opening.frame()))) == opening
    numbers = ProcessNumbers(rounds=1, pairs=2, cpu_s=3.5)
    frame = json.loads(json.dumps(answer([2**62, 7, 8], [1.5, float("nan"), float("inf")], numbers=numbers)))
    assert scores_of(frame) == {2**62: 1.5}
    assert numbers_of(frame) == numbers


# ---- folders


def tensors(path: Path, *, cut: int = 0) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes((len(header).to_bytes(8, "little") + header + bytes(8))[: -cut or None])


def fitted(path: Path, *, ranker: str = "languageModel", **document: object) -> Path:
    path.mkdir()
    (path / FOLDER_FILE).write_text(json.dumps({"ranker": ranker, **document}))
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    for name in ("model.safetensors", HEAD_FILE, SOLUTION_FILE):
        tensors(path / name)
    return path


def test_a_job_may_name_a_folder(tmp_path: Path) -> None:
    fitted(tmp_path / "lm")
    fitted(tmp_path / "pf", ranker="policyFeatures", model="some/name")
    for key, name in (("languageModel", "lm"), ("policyFeatures", "pf")):
        choice = RankerChoice.model_validate({key: {"path": name}})
        assert isinstance(open_ranker(choice, base_dir=tmp_path), AnsweredRanker)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (
            lambda path: (path / FOLDER_FILE).unlink(),
            "must be a folder of the ranker languageModel (ranker.json names it)",
        ),
        (lambda path: (path / FOLDER_FILE).write_text("[]"), "must be a folder of the ranker languageModel"),
        (
            lambda path: (path / FOLDER_FILE).write_text('{"ranker": "policyFeatures"}'),
            "must be a folder of the ranker languageModel (ranker.json names it), got 'policyFeatures'",
        ),
        (lambda path: (path / HEAD_FILE).unlink(), "head.safetensors cannot be read: No such file"),
        (lambda path: tensors(path / HEAD_FILE, cut=3), "head.safetensors is damaged: it is cut off"),
        (lambda path: (path / HEAD_FILE).write_bytes(b"no"), "head.safetensors is damaged: "),
        (lambda path: (path / HEAD_FILE).write_bytes(b"\xff" * 20), "head.safetensors is damaged: "),
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
        open_ranker(RankerChoice.model_validate({"languageModel": {"path": "lm"}}), base_dir=tmp_path)
    assert str(caught.value).startswith(f"spec.scheduling.ranker.languageModel.path: {line}")
    assert "\n" not in str(caught.value)


def test_a_solution_whose_policy_is_gone_is_one_line(tmp_path: Path) -> None:
    path = fitted(tmp_path / "pf", ranker="policyFeatures", model=str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"path: rests on a model that must be a folder with config\.json, got .*gone"):
        check_folder(path, ranker="policyFeatures", field="path")
