"""Where the engine `vllm` ends an answer: as engine `hf` does (`tests/integration/test_answer_ends.py`)."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import EngineOptions
from support.engine_requests import request, sampling
from support.speaking_models import END, WORDS, save_speaker, speaker_weights

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end


@pytest.mark.parametrize(
    ("generation", "stop", "text"),
    [({"eos_token_id": [0, 2]}, [], "hello"), ({}, ["lo" + END], "hel")],
    ids=["end", "stop"],
)
def test_an_answer_ends_at_its_end_token_or_at_a_stop_string_with_one(
    generation: dict[str, Any], stop: list[str], text: str, tmp_path: Path
) -> None:
    spec = VllmEngineSpec.model_validate({"maxConcurrency": 2, "kvCacheBytes": "64Mi"})
    folder = save_speaker(tmp_path, **generation)
    engine = engine_kind("vllm").create(EngineOptions(spec=spec, model_path=str(folder), threads=1))
    try:
        engine.load_weights(version=1, tensors=speaker_weights())
        limits = sampling(temperature=0.0, max_tokens=9, stop=stop)
        deltas = engine.add([request(0, "say:", limits=limits)])
        while engine.active():
            deltas += engine.step()
    finally:
        engine.close()
    tokens = [WORDS[token] for delta in deltas for token in delta.tokens]
    assert (tokens, deltas[-1].finish_reason, deltas[-1].text) == (["hel", "lo", END], "stop", text)
