"""A model that ends its turn with a token of its own: engines stop there, `streamrl generate` too, and an export keeps what says so."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.spec import parse_job
from streamrl.spec.generators import HfEngineSpec
from streamrl.spec.training import Sherl
from streamrl_cli.main import main
from streamrl_cli.runner.folder import create_folder
from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import Delta, EngineOptions
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.models.load import load_model, load_tokenizer
from streamrl_workers.models.side_path import add_side_path
from streamrl_workers.stream.model_files import model_files
from streamrl_workers.trainer.engines import model_files as trained_files
from support.engine_requests import request, sampling
from support.jobs import simulated_job
from support.runs import LocalRun
from support.speaking_models import CHATML, END, WORDS, save_speaker, speaker_weights

BOTH = {"eos_token_id": [0, 2]}
HELLO = ["hel", "lo", END]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def said(folder: Path, *, stop: Sequence[str] = (), most: int = 9) -> Delta:
    """All that the engine `hf` makes of `say:`, as one delta."""
    engine = create_hf(EngineOptions(spec=HfEngineSpec(slots=1), model_path=str(folder), max_tokens=most))
    engine.load_weights(version=1, tensors=speaker_weights())
    limits = sampling(temperature=0.0, max_tokens=most, stop=stop)
    deltas = engine.add([request(0, "say:", limits=limits)])
    while engine.active():
        deltas += engine.step()
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Delta(lease=0, tokens=tokens, logprobs=(), version=1, finish_reason=deltas[-1].finish_reason, text=deltas[-1].text)  # fmt: skip


def words(delta: Delta) -> list[str]:
    return [WORDS[token] for token in delta.tokens]


@pytest.mark.parametrize(
    ("template", "generation"), [(None, BOTH), (None, {"eos_token_id": 2}), (CHATML, {}), (CHATML, {"eos_token_id": 0})]
)
def test_an_answer_ends_at_the_end_that_the_models_files_name(
    template: str | None, generation: dict[str, Any], tmp_path: Path
) -> None:
    found = said(save_speaker(tmp_path, template=template, **generation))
    assert (words(found), found.finish_reason, found.text) == (HELLO, "stop", "hello")


def test_without_it_the_answer_runs_on_to_the_limit(tmp_path: Path) -> None:
    found = said(save_speaker(tmp_path))
    assert (len(found.tokens), found.finish_reason) == (9, "length")


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        ([END], HELLO, "hello"),
        (["lo" + END], HELLO, "hel"),
        (["never", "hello" + END], HELLO, ""),
        (["zzz"], None, None),
        (["lo!"], [*HELLO, "!"], "hel"),  # as the text reads without special tokens
        ([END + "!"], [*HELLO, "!"], "hello"),
        ([END + "!hel"], [*HELLO, "!", "hel"], "hello"),
    ],
)
def test_stop_strings_match_special_tokens(
    stop: list[str], tokens: list[str] | None, text: str | None, tmp_path: Path
) -> None:
    found = said(save_speaker(tmp_path), stop=stop)
    if tokens is None:
        assert (len(found.tokens), found.finish_reason) == (9, "length")
    else:
        assert (words(found), found.finish_reason, found.text) == (tokens, "stop", text)


@pytest.mark.parametrize(("template", "stop"), [(None, []), (CHATML, []), (None, [END])])
def test_generate_ends_where_the_run_did(
    template: str | None, stop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job: dict[str, Any] = simulated_job()
    job["spec"]["task"]["sampling"]["stop"] = stop
    folder = create_folder(parse_job(job), base_dir=tmp_path, parent=tmp_path)
    save_speaker(folder.file("model"), template=template, **({} if template or stop else BOTH))
    assert main(["generate", "--checkpoint", str(folder.path), "--prompt", "say:", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "say:hello\n"


@pytest.mark.parametrize("sherl", [None, Sherl.model_validate({"lateLayers": 1, "width": 4})])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_p": 0.9}])
def test_an_export_keeps_the_generation_settings(settings: dict[str, Any], sherl: Sherl | None, tmp_path: Path) -> None:
    """Also such that `save_pretrained` refuses, as of many models; and once more when the export is trained on."""
    folder = save_speaker(tmp_path / "0", **BOTH, **settings)
    for export in (tmp_path / "1", tmp_path / "2"):
        export.mkdir()
        model = load_model(str(folder))
        if sherl is not None:
            add_side_path(model, sherl)
        published = trained_files.tensors(model)
        trained_files.export(export, model=model, published=published, tokenizer=load_tokenizer(str(folder)))
        kept = json.loads((export / "generation_config.json").read_text())
        assert (BOTH | settings).items() <= kept.items()
        folder = export


def test_generators_of_another_cluster_get_the_generation_settings(tmp_path: Path) -> None:
    assert tmp_path / "generation_config.json" in model_files(save_speaker(tmp_path, **BOTH))


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_run_rewards_answers_that_end_in_training_and_evaluation(tmp_path: Path) -> None:
    save_speaker(tmp_path / "model", **BOTH)
    rows = [json.dumps({"prompt": "say:" * (1 + number), "answer": "hello"}) for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    task = {
        "dataset": {"jsonl": {"path": "rows.jsonl"}},
        "groupSize": 2,
        "sampling": {"maxTokens": 9},
        "rewards": [{"name": "hello", "exactMatch": {}}],
        "evaluation": {"maxPrompts": 1, "intervalSteps": 1},
    }
    spec = {
        "model": {"path": {"directory": "model"}},
        "task": task,
        "algorithm": {"grpo": {}},
        "pipeline": {"mode": "StreamSync", "maxStalenessSteps": 0, "batchGroups": 2, "steps": 1},
        "generators": [{"name": "g", "engine": {"hf": {"slots": 4}}}],
    }
    job = {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "ends"}, "spec": spec}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.process.wait(390) == 0, run.logs()
    (step,) = read_jsonl(run.folder / "metrics" / "steps.jsonl")
    assert (step["reward_mean"], step["truncated"], step["length_max"]) == (1.0, 0, 3)
    assert [line["mean_reward"] for line in read_jsonl(run.folder / "metrics" / "evaluations.jsonl")] == [1.0, 1.0]
    assert BOTH.items() <= json.loads((run.folder / "model" / "generation_config.json").read_text()).items()
