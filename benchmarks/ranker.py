"""How well length signals find the longest prompts: three tasks of reasoning-gym, real completions of a small model.

    python benchmarks/ranker.py [--train 2000] [--held-out 1000] [--samples 8] [--warm-up 1200] [--hidden 128] [--language-model]

A character model of 0.5 M parameters is warmed up on worked answers of all three tasks (sums with every running sum, sorted
lists, words spelled backward), then completes each prompt `samples` times at temperature 1; a prompt's length is the mean of its
tokens. Rankers learn from `train` prompts and are judged on `held-out` others. `history` is what the scheduler knows of a prompt
after one epoch: its mean in epoch 1 against epoch 2, which another policy makes (the model after `--drift` more
steps). `a second draw` is the same policy again: nothing that is known before a group begins can be expected to be much better.
Prints a table; times are of this machine.
"""

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import HfEngineSpec
from streamrl.spec.model import ScratchModel
from streamrl.spec.tasks.datasets import ReasoningGymDataset
from streamrl_cli.ranker import PromptLength
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.engines.hf.engine import create
from streamrl_workers.models.load import load_model
from streamrl_workers.models.published import Parameters
from streamrl_workers.models.scratch import build_model, build_tokenizer
from streamrl_workers.models.warm_up import WarmUpPair as Example
from streamrl_workers.models.warm_up import warm_up
from streamrl_workers.ranker.hashing import HashingRanker
from streamrl_workers.ranker.language_model import LanguageModel
from streamrl_workers.scheduler.lengths.trust import Quality, measure
from streamrl_workers.tasks.procedural import ProceduralSource, open_procedural

POSITIONS = 384
MAX_TOKENS = 160
_ALIKE = 16
"""Warm-up batches are of alike lengths: so many are sorted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A data set, and how one of its entries is asked and answered."""

    name: str
    parameters: dict[str, object]
    example: Callable[[Mapping[str, Any]], Example]
    """Metadata of an entry -> prompt and worked answer."""


def sums(metadata: Mapping[str, Any]) -> Example:
    """Every running sum."""
    terms = metadata["expression"].split()
    total, steps = int(terms[0]), []
    for sign, number in zip(terms[1::2], terms[2::2], strict=True):
        total += int(sign + number)
        steps.append(f"{sign}{number}={total}")
    return Example(prompt=f"add {' '.join(terms)}: ", target=f"{terms[0]}{', '.join(steps)}")


def sorting(metadata: Mapping[str, Any]) -> Example:
    """The sorted list."""
    given, ordered = (
        [number.removesuffix(".0") for number in metadata[name]] for name in ("original_numbers", "sorted_numbers")
    )
    order = f"{metadata['direction']} {','.join(given)}"
    return Example(prompt=f"sort {order}: ", target=" then ".join(ordered))


def spelling(metadata: Mapping[str, Any]) -> Example:
    """Letter by letter."""
    word = metadata["word"].lower()
    return Example(prompt=f"spell {word} backward: ", target="-".join(reversed(word)))


TASKS = (
    Task(
        name="chain_sum",
        parameters={"min_terms": 2, "max_terms": 14, "min_digits": 1, "max_digits": 2},
        example=sums,
    ),
    Task(
        name="number_sorting",
        parameters={"min_numbers": 3, "max_numbers": 16, "min_value": 0, "max_value": 99, "max_decimals": 0},
        example=sorting,
    ),
    Task(name="spell_backward", parameters={"min_word_len": 3, "max_word_len": 10}, example=spelling),
)


class Examples:
    """Entries of the three tasks in turn."""

    def __init__(self) -> None:
        self._sources: list[tuple[Task, ProceduralSource]] = [
            (
                task,
                open_procedural(
                    ReasoningGymDataset.model_validate({"name": task.name, "parameters": task.parameters}), seed=0
                ),
            )
            for task in TASKS
        ]

    def __iter__(self) -> Iterator[Example]:
        number = 0
        while True:
            task, source = self._sources[number % len(self._sources)]
            yield task.example(source.question("train", number).metadata)
            number += 1


def alike(examples: Iterator[Example], *, batch: int) -> Iterator[Example]:
    """Batches of alike lengths in random order."""
    draw = random.Random(0)
    while True:
        chunk = sorted((next(examples) for _ in range(batch * _ALIKE)), key=lambda e: len(e.prompt) + len(e.target))
        batches = [chunk[first : first + batch] for first in range(0, len(chunk), batch)]
        draw.shuffle(batches)
        yield from (example for one in batches for example in one)


def train(model: torch.nn.Module, *, tokenizer: object, examples: Iterator[Example], steps: int, rate: float) -> None:
    """Imitate the worked answers."""
    spec = ScratchModel.model_validate({"warmUp": {"steps": steps, "batchSize": 64, "learningRate": rate}}).warm_up
    began_s = time.perf_counter()
    for progress in warm_up(model, tokenizer=tokenizer, pairs=alike(examples, batch=64), spec=spec):
        if progress.step % 100 == 0:
            print(
                f"# step {progress.step}: loss {progress.loss:.3f}, {time.perf_counter() - began_s:.0f} s", flush=True
            )


class Sampler:
    """A model folder in the engine."""

    def __init__(self, folder: str, *, slots: int, max_tokens: int, temperature: float, seed: int) -> None:
        self._engine = create(EngineOptions(spec=HfEngineSpec(slots=slots), model_path=folder))
        self._engine.load_weights(version=0, tensors=Parameters(load_model(folder)).snapshot())
        self._sampling = pb.Sampling(temperature=temperature, top_p=1.0, max_tokens=max_tokens)
        self._seed = seed

    def pairs(self, prompts: Sequence[str], *, samples: int) -> Iterator[PromptLength]:
        """One for each completion, as they finish; prompts that do not fit the model are left out."""
        waiting = self._requests(prompts, samples=samples)
        tokens: dict[int, int] = {}
        waiting_is_over = False
        while not waiting_is_over or self._engine.active():
            admitted: list[pb.SampleRequest] = []
            while len(admitted) < self._engine.free() and (request := next(waiting, None)) is not None:
                admitted.append(request)
            waiting_is_over = len(admitted) < self._engine.free()
            for delta in [*self._engine.add(admitted), *self._engine.step()]:
                tokens[delta.lease] = tokens.get(delta.lease, 0) + len(delta.tokens)
                if delta.finish_reason is not None:
                    count = tokens.pop(delta.lease)
                    if delta.error is None:
                        yield PromptLength(prompts[delta.lease // samples], count)

    def _requests(self, prompts: Sequence[str], *, samples: int) -> Iterator[pb.SampleRequest]:
        for number in range(len(prompts) * samples):
            group = number // samples
            yield pb.SampleRequest(
                lease=number,
                group_id=group,
                prompt=prompts[group],
                sampling=self._sampling,
                seed=self._seed + number,
            )


def lengths(
    model: torch.nn.Module, *, tokenizer: object, prompts: Sequence[str], samples: int, seed: int
) -> list[PromptLength]:
    """Mean tokens of each prompt, in the prompts' order."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        sampler = Sampler(folder, slots=128, max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
        tokens: dict[str, list[float]] = defaultdict(list)
        for pair in sampler.pairs(prompts, samples=samples):
            tokens[pair.prompt].append(pair.tokens)
    return [PromptLength(prompt=prompt, tokens=sum(tokens[prompt]) / len(tokens[prompt])) for prompt in prompts]


def judged(scores: Sequence[float], pairs: Sequence[PromptLength]) -> Quality:
    return measure(scores, [pair.tokens for pair in pairs])


def row(name: str, quality: Quality, *, fit_s: float | None = None, score_us: float | None = None) -> None:
    recall = f"{quality.recall:.2f} (≥ {quality.recall_lower:.2f})"
    fit_text = "" if fit_s is None else f"{fit_s:.1f}"
    score_text = "" if score_us is None else f"{score_us:,.0f}"
    print(f"| {name} | {recall} | {quality.rank_correlation or 0:.2f} | {fit_text} | {score_text} |", flush=True)


def compare(known: list[PromptLength], judged_pairs: list[PromptLength], *, folder: str, language_model: bool) -> None:
    """One row for each ranker."""
    prompts = [pair.prompt for pair in judged_pairs]
    online, began_s = HashingRanker(), time.perf_counter()
    for pair in known:
        online.learn(pair.prompt, pair.tokens)
    fit_s, began_s = time.perf_counter() - began_s, time.perf_counter()
    scores = online.scores(prompts)
    score_us = (time.perf_counter() - began_s) / len(prompts) * 1e6
    row("hashing, learning in the run", judged(scores, judged_pairs), fit_s=fit_s, score_us=score_us)
    if language_model:
        began_s = time.perf_counter()
        fitted = LanguageModel.fitted(known, model=folder, passes=6, learning_rate=1e-3, batch_prompts=16, seed=0)
        fit_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        scores = fitted.scores(prompts)
        score_us = (time.perf_counter() - began_s) / len(prompts) * 1e6
        row("languageModel, fitted", judged(scores, judged_pairs), fit_s=fit_s, score_us=score_us)
    row("characters of the prompt", judged([float(len(prompt)) for prompt in prompts], judged_pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("train", 2000),
        ("held-out", 1000),
        ("samples", 8),
        ("warm-up", 1200),
        ("drift", 100),
        ("hidden", 128),
        ("layers", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--language-model", action="store_true", help="fine-tune the small model as a ranker too")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    examples = iter(Examples())
    characters = {c for _ in range(4_000) for e in (next(examples),) for c in e.prompt + e.target}
    tokenizer = build_tokenizer(characters, max_positions=POSITIONS)
    sizes = {"hiddenSize": args.hidden, "layers": args.layers, "heads": 4, "intermediateSize": 3 * args.hidden}
    sizes["maxPositions"] = POSITIONS
    model = build_model(ScratchModel.model_validate(sizes), tokenizer=tokenizer, seed=0)
    train(model, tokenizer=tokenizer, examples=examples, steps=args.warm_up, rate=2e-3)
    prompts: dict[str, None] = {}
    while len(prompts) < args.train + args.held_out:
        prompts.setdefault(next(examples).prompt)
    began_s, asked = time.perf_counter(), list(prompts)
    first = lengths(model, tokenizer=tokenizer, prompts=asked, samples=args.samples, seed=1)
    print(f"# {len(asked) * args.samples} completions in {time.perf_counter() - began_s:.0f} s", flush=True)
    known, held_out = first[: args.train], first[args.train :]
    ordered = sorted(pair.tokens for pair in first)
    print(f"# tokens: median {ordered[len(ordered) // 2]:.0f}, P90 {ordered[len(ordered) * 9 // 10]:.0f}", flush=True)
    print("\n| signal | recall 20 % | rank correlation | fit, s | µs a prompt |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        compare(known, held_out, folder=folder, language_model=args.language_model)
    judged_prompts = [pair.prompt for pair in held_out]
    again = lengths(model, tokenizer=tokenizer, prompts=judged_prompts, samples=args.samples, seed=2_000_003)
    row("a second draw of the same policy", judged([pair.tokens for pair in again], held_out))
    train(model, tokenizer=tokenizer, examples=examples, steps=args.drift, rate=5e-4)
    later = lengths(model, tokenizer=tokenizer, prompts=judged_prompts, samples=args.samples, seed=4_000_007)
    row("history after one epoch", judged([pair.tokens for pair in held_out], later))


if __name__ == "__main__":
    main()
