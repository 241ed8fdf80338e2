"""Tokens per second of the engine `hf` beside `model.generate` and transformers' continuous batching.

    python benchmarks/hf_engine.py [--requests 192] [--slots 64] [--repeats 3] [--hidden 96] [--layers 3] [--batch-invariant]

All three sample the same requests (temperature 1, log-normal lengths, random weights) with one thread. The
kinds take turns within each repeat, so that a busy machine hurts all alike; the table shows medians. `generate`
runs batches of `slots` requests until the longest of a batch is done; only wanted tokens count. Ours gives
log-probs too and frees slots; neither is asked of `generate`. The best case for a static batch, lengths all
equal, is the second table. With --batch-invariant the others are the engine itself with `batchInvariant`, and with one slot,
by processor time: so a busy machine does not matter.
"""

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.models.published import Parameters

VOCABULARY = 64
MEDIAN_TOKENS, SIGMA, LONGEST_TOKENS = 40, 0.8, 256
GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    prompts: list[str]
    lengths: list[int]  # tokens to generate, per prompt
    slots: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_model(*, hidden: int, layers: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(VOCABULARY)}, unk_token="!"))  # noqa: S106 - a token of the vocabulary
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def make_work(*, requests: int, slots: int, equal: bool) -> Work:
    random = Random(0)
    groups = ["".join(random.choices("0123456789+-", k=random.randint(8, 24))) for _ in range(requests // GROUP)]
    lengths = [
        min(LONGEST_TOKENS, max(1, round(MEDIAN_TOKENS * random.lognormvariate(0, SIGMA)))) for _ in range(requests)
    ]
    return Work(
        prompts=[groups[i // GROUP] for i in range(requests // GROUP * GROUP)],
        lengths=[MEDIAN_TOKENS] * requests if equal else lengths,
        slots=slots,
    )


def run_ours(engine: HfEngine, work: Work) -> None:
    waiting, given = list(_requests(work)), 0
    while waiting or engine.active():
        free = engine.free()
        ended = engine.add(waiting[:free])
        assert not ended
        del waiting[:free]
        given += sum(len(delta.tokens) for delta in engine.step())
    assert given == work.tokens


def _requests(work: Work) -> Iterator[pb.SampleRequest]:
    for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        sampling = pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=length)
        yield pb.SampleRequest(lease=i, group_id=i // GROUP, prompt=prompt, sampling=sampling, seed=i)


@torch.inference_mode()
def run_static(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, work: Work) -> None:
    for first in range(0, len(work.prompts), work.slots):
        ids = [tokenizer(prompt)["input_ids"] for prompt in work.prompts[first : first + work.slots]]
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        new_tokens = max(work.lengths[first : first + work.slots])
        model.generate(padded, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new_tokens, pad_token_id=0)


def run_continuous(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, work: Work) -> None:
    """Sized by hand: the default sizes its pools by the free memory, and walks them in every step."""
    sizes = ContinuousBatchingConfig(
        page_size=32, num_blocks=work.slots * 12, max_batch_tokens=2 * work.slots, max_requests_per_batch=work.slots
    )
    settings = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=LONGEST_TOKENS)
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=sizes
    ) as manager:
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(tokenizer(prompt)["input_ids"], max_new_tokens=length)
        given = 0
        for _ in work.prompts:
            result = manager.get_result(timeout=120)
            assert result is not None and result.is_finished(), "continuous batching stalled"
            given += len(result.generated_tokens)
        assert given == work.tokens


def default_start_seconds(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Until the first token of one request with continuous batching's own settings."""
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    began_s = time.perf_counter()
    model.generate_batch(inputs=[tokenizer("1+2")["input_ids"]], generation_config=settings)
    return time.perf_counter() - began_s


def tokens_per_second(run: Callable[[], None], work: Work, *, clock: Callable[[], float]) -> float:
    began_s = clock()
    with contextlib.redirect_stdout(io.StringIO()):
        run()
    return work.tokens / (clock() - began_s)


def compare(
    title: str, runs: dict[str, Callable[[], None]], *, work: Work, repeats: int, clock: Callable[[], float]
) -> None:
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            rate = tokens_per_second(run, work, clock=clock)
            if repeat > 0:  # the first round warms up
                measured[name].append(rate)
    ours = statistics.median(measured["hf engine"])
    print(f"\n{title}: {len(work.prompts)} requests, {work.tokens} tokens, {work.slots} slots, median of {repeats}")
    print(f"{'':34}{'tokens/s':>10}{'range':>18}{'ours is':>10}")
    for name, rates in measured.items():
        middle = statistics.median(rates)
        print(f"{name:34}{middle:10,.0f}{f'{min(rates):,.0f}-{max(rates):,.0f}':>18}{ours / middle:9.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 192), ("slots", 64), ("repeats", 3), ("hidden", 96), ("layers", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--default-start", action="store_true", help="also time continuous batching's own settings")
    parser.add_argument("--batch-invariant", action="store_true", help="compare the engine with itself")
    args = parser.parse_args()
    clock = time.process_time if args.batch_invariant else time.perf_counter
    torch.set_num_threads(1)
    tokenizer, model = make_tokenizer(), make_model(hidden=args.hidden, layers=args.layers)
    began_s = time.perf_counter()

    def engine_with(*, slots: int, batch_invariant: bool = False) -> HfEngine:
        made = HfEngine(
            model=make_model(hidden=args.hidden, layers=args.layers),
            tokenizer=tokenizer,
            end_ids=frozenset(),
            slots=slots,
            batch_invariant=batch_invariant,
        )
        made.load_weights(version=0, tensors=Parameters(model).snapshot())
        return made

    engine = engine_with(slots=args.slots)
    print(
        f"Qwen2, {sum(p.numel() for p in model.parameters()):,} parameters; our engine starts in {time.perf_counter() - began_s:.2f} s"
    )
    invariant, one_slot = engine_with(slots=args.slots, batch_invariant=True), engine_with(slots=1)
    for title, equal in (("mixed lengths", False), ("equal lengths", True)):
        work = make_work(requests=args.requests, slots=args.slots, equal=equal)
        runs: dict[str, Callable[[], None]] = {
            "hf engine": lambda work=work: run_ours(engine, work),
        }
        own: dict[str, Callable[[], None]] = {
            "hf engine, batchInvariant": lambda work=work: run_ours(invariant, work),
            "hf engine, one slot": lambda work=work: run_ours(one_slot, work),
        }
        others: dict[str, Callable[[], None]] = {
            "model.generate, static batch": lambda work=work: run_static(model, tokenizer, work),
            "transformers continuous batching": lambda work=work: run_continuous(
                make_model(hidden=args.hidden, layers=args.layers), tokenizer, work
            ),
        }
        compare(title, runs | (own if args.batch_invariant else others), work=work, repeats=args.repeats, clock=clock)
    if args.default_start:
        fresh = make_model(hidden=args.hidden, layers=args.layers)
        print(
            f"\ncontinuous batching, own settings: {default_start_seconds(fresh, tokenizer):.1f} s to the first token"
        )


if __name__ == "__main__":
    main()
