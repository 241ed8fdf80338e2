"""vLLM's own span of a request stands where the request says; a request without a place makes none."""

from pathlib import Path

import pytest

from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.tracing.spans import SpanId
from support.engine_requests import request
from support.otlp_collector import collecting
from support.runs import wait_for
from support.vllm_models import make, published, save

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end


@pytest.mark.soak
def test_a_traced_request_has_the_span_of_vllm_below_its_own(tmp_path: Path) -> None:
    place = SpanId(0x1234 << 64 | 5, 0x77)
    spec = VllmEngineSpec.model_validate({"maxConcurrency": 4, "kvCacheBytes": "64Mi"})
    folder = save("qwen3", tmp_path)
    with collecting() as collector:
        options = EngineOptions(spec=spec, model_path=str(folder), threads=1, traces_endpoint=collector.endpoint)
        engine = engine_kind("vllm").create(options)
        try:
            engine.load_weights(version=1, tensors=published(make("qwen3", seed=1)))
            engine.add([request(1, "12"), request(2, "34", traceparent=place.traceparent), request(3, "56")])
            while engine.active():
                engine.step()
            wait_for(lambda: collector.spans, what="vLLM's span")
        finally:
            engine.close()
        (span,) = collector.spans
    assert (span.name, span.service) == ("llm_request", "streamrl-vllm")
    assert (span.trace, span.parent) == (f"{place.trace:032x}", f"{place.span:016x}")
    assert span.attributes["gen_ai.usage.completion_tokens"] > 0
