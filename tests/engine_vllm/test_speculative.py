"""Speculative decoding from a sample's own tokens: drafts change how fast greedy tokens come, and nothing else.

On CPUs it is refused: with drafts this build of vLLM divides the logits of sampled tokens by memory that nobody wrote. Greedy ones are right,
so the refusal is taken away here.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.engines.vllm import options
from support.vllm_models import logprobs, make, published, save

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

REQUESTS, TOKENS = 16, 96
CLOSE = 1e-4
NGRAM = {"ngram": {"draftTokens": 4, "minMatchTokens": 2, "maxMatchTokens": 4}}

Generated = dict[int, tuple[tuple[int, ...], list[int], list[float]]]
"""Lease -> prompt, tokens, log-probs."""


def generate(folder: Path, *, speculative: dict[str, Any] | None) -> tuple[Generated, dict[str, float]]:
    """Greedy completions; and vLLM's counters of drafts."""
    spec = {"maxConcurrency": REQUESTS, "kvCacheBytes": "64Mi", "speculative": speculative}
    given = EngineOptions(spec=VllmEngineSpec.model_validate(spec), model_path=str(folder), threads=1)
    engine = engine_kind("vllm").create(given)
    found: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    prompts = {}
    try:
        engine.load_weights(version=0, tensors=published(make("qwen3", seed=1)))
        assert engine.add([request(lease) for lease in range(REQUESTS)]) == []
        while engine.active():
            for delta in engine.step():
                assert delta.error is None, delta.error
                found[delta.lease][0].extend(delta.tokens)
                found[delta.lease][1].extend(delta.logprobs)
                prompts.setdefault(delta.lease, delta.prompt_tokens)
        page = engine.metrics().decode().splitlines()
    finally:
        engine.close()
    return {lease: (prompts[lease] or (), *both) for lease, both in found.items()}, counters(page)


def counters(page: Sequence[str]) -> dict[str, float]:
    names = ("drafts", "draft_tokens", "accepted_tokens")
    known = {f"vllm:spec_decode_num_{name}_total": name for name in names}
    return {known[name]: float(line.split()[-1]) for line in page if (name := line.split("{")[0]) in known}


def request(lease: int) -> pb.SampleRequest:
    sampling = pb.Sampling(temperature=0.0, top_p=1.0, max_tokens=TOKENS)
    return pb.SampleRequest(lease=lease, group_id=lease, prompt=f"12+{lease}=12+{lease}=", seed=lease, sampling=sampling)  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_greedy_tokens_and_log_probs_are_those_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("qwen3", tmp_path)
    plain, none = generate(folder, speculative=None)
    monkeypatch.setattr(options, "refuse_drafts_on_cpus", lambda _: None)
    drafted, counted = generate(folder, speculative=NGRAM)
    assert none == {}
    assert 0 < counted["accepted_tokens"] <= counted["draft_tokens"]
    model = make("qwen3", seed=1)
    for lease, (prompt, tokens, given) in drafted.items():
        assert tokens == plain[lease][1], lease
        truth = logprobs(model, prompt, tokens)
        assert max(abs(a - b) for a, b in zip(given, truth, strict=True)) < CLOSE, lease


def test_on_cpus_drafts_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        generate(save("qwen3", tmp_path), speculative=NGRAM)
    assert refused.value.lines == [
        "engine.vllm.speculative: must be absent on CPUs: with drafts vLLM's CPU build gives wrong log-probs of sampled tokens; leave it out"
    ]


def test_the_reason_for_the_refusal_still_stands() -> None:
    """Where this fails, the build is mended: `expand_batch_to_tokens` gives each draft token its request's temperature."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperatures, ends = torch.tensor([1.0, 0.5]), torch.tensor([2, 3])
    expanded = torch.full((3,), -7.0)
    _expand_kernel_impl(expanded, temperatures, ends, 0, 1)
    assert expanded.tolist() == [-7.0] * 3


def test_what_suffix_decoding_needs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "refuse_drafts_on_cpus", lambda _: None)
    with pytest.raises(UserError, match=r"speculative.suffix: needs the package arctic-inference; install it"):
        generate(save("qwen3", tmp_path), speculative={"suffix": {}})
