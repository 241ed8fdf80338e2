"""`streamrl models`, and what `validate` says by the same table: a row by the configuration alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli.main import main
from streamrl_cli.model_table import families_of, shape_of, table
from support.jobs import tiny_job, write_prompts

QWEN3 = {"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False}
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (QWEN3, ["qwen3"]),
        ({"model_type": "mistral", "sliding_window": None}, ["mistral"]),
        ({"model_type": "mistral", "sliding_window": 4096}, ["mistral_window"]),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, ["phi3_longrope"]),
        ({"model_type": "phi3"}, ["phi4", "phi3"]),
        ({"model_type": "gemma3", "text_config": GEMMA3}, []),  # with its vision tower: not measured
        ({"model_type": "qwen3", "sliding_window": 4096}, []),
    ],
)
def test_a_configuration_has_a_row(config: dict[str, Any], rows: list[str]) -> None:
    assert families_of(shape_of(config)) == rows


def test_no_cell_of_the_table_is_wrong() -> None:
    cells = [cell for row in table()["families"].values() for cell in row["cells"].values()]
    assert {cell["state"] for cell in cells} <= {"right", "refused"}


def test_a_folder_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert main(["models", str(tmp_path)]) == 0
    assert "qwen3 (model_type qwen3)\n  trainer: log-probs, gradient: " in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    assert main(["models", str(tmp_path)]) == 0
    assert "'bloom' is not in the table of models; each generator proves it" in capsys.readouterr().out


def test_what_is_no_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "qwen9"]) == 2
    assert capsys.readouterr().err.startswith("models: must be a folder with config.json")


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"model_type": "bloom"}, "'bloom' is not in the table of models"),
        (QWEN3, ""),
    ],
)
def test_validate_says_what_the_table_says(
    config: dict[str, Any], warning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    write_prompts(tmp_path / "prompts.jsonl")
    job = tiny_job()
    job["spec"]["model"] = {"path": {"directory": "model"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 0
    errors = capsys.readouterr().err
    assert (warning in errors) if warning else ("table of models" not in errors)
