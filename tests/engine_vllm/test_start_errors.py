"""What vLLM refuses at its start is the user's error, in one line; found by vLLM itself, in this process or in its core."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from vllm import AsyncEngineArgs

from streamrl.errors import EXIT_USER_ERROR, UserError
from streamrl.spec import vllm_arguments
from streamrl.spec.generators import VllmEngineSpec
from streamrl_cli.jobfile import load_job
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.engines.vllm.options import engine_arguments
from support.runs import LocalRun
from support.vllm_models import POSITIONS, save

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
LENGTH = "engine.vllm.extraArgs.max_model_len"
POSITIONS_RULE = f"must be tokens from 1 to {POSITIONS}, which the model has positions for"


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"extraArgs": {"max_model_len": "4096"}}, f"{LENGTH}: {POSITIONS_RULE}, got 4096; lower it, or leave it out"),
        ({"extraArgs": {"max_model_len": "lots"}}, f"{LENGTH}: {POSITIONS_RULE}, got 'lots'; lower it, or leave it out"),
        (
            {"kvCacheBytes": "64Ki"},
            f"{LENGTH}: the keys and values of one sequence must fit the memory for them, got {POSITIONS}; set at most 96, or raise kvCacheBytes",
        ),
        ({"quantization": "none-such"}, "engine.vllm: is refused by vLLM: Unknown quantization method: none-such"),
    ],
)  # fmt: skip
def test_what_vllm_refuses_is_one_line(*, spec: dict[str, Any], line: str, tmp_path: Path) -> None:
    given = VllmEngineSpec.model_validate({"maxConcurrency": 8, "kvCacheBytes": "64Mi"} | spec)
    with pytest.raises(UserError) as refused:
        engine_kind("vllm").create(EngineOptions(spec=given, model_path=str(save("qwen3", tmp_path)), threads=1))
    (said,) = refused.value.lines
    assert said.startswith(line)


def test_the_contract_knows_vllms_arguments_and_those_that_streamrl_sets() -> None:
    assert {field.name for field in dataclasses.fields(AsyncEngineArgs)} == vllm_arguments.KNOWN

    def asked(**extra: str) -> set[str]:
        spec = VllmEngineSpec.model_validate({"extraArgs": extra})
        return set(engine_arguments(EngineOptions(spec=spec, model_path="m", threads=1), limit_tokens=8))

    made = asked()
    assert made >= set(vllm_arguments.FIXED)
    assert asked(**dict.fromkeys(made - set(vllm_arguments.FIXED), "1")) == made


@pytest.mark.soak
def test_a_run_ends_with_that_line_and_is_not_tried_again(tmp_path: Path) -> None:
    changes = ["spec.model.scratch.heads=2", "spec.model.scratch.warmUp.steps=1"]
    engine = "spec.generators[0].engine={vllm: {kvCacheBytes: 32Ki}}"
    job = load_job(EXAMPLE, overrides=[*changes, engine]).model_dump(mode="json", by_alias=True, exclude_none=True)
    for module in EXAMPLE.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.process.wait(600) == EXIT_USER_ERROR, run.logs()
    assert "engine.vllm.kvCacheBytes: must have room for keys and values" in run.said().splitlines()[-1]
    assert "started again" not in run.said()
