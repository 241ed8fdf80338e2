"""The process that measures one stage: `python -m streamrl_cli.profiling.probe decode|train TASK`.

Consumes the environment of a worker (run folder, model, threads, cores, rank) and TASK, a JSON object. Produces JSON lines
on standard output, one for each thing measured, flushed as it is known. A user's mistake is one line on standard error and
exit code 2. It ends at once when its parent is gone. The one module of the command line that may load torch, which its
imports do when a stage is measured.

`train` with several processes is rank 0; the others are the trainer's own (`python -m streamrl_workers.trainer`).
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO

from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import ENV_CODE_DIR, ENV_MODEL_PATH, ENV_RUN_DIR, ENV_THREADS, FILE_JOB
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec, read_job
from streamrl.spec.generators import GeneratorPool
from streamrl_cli import console
from streamrl_cli.profiling import timing
from streamrl_workers.generator.engines.base import Engine, EngineFailedError, EngineOptions
from streamrl_workers.process.environment_variables import integer, pin_to_cpus, required
from streamrl_workers.process.shutdown import watch_parent

_ENDLESS_TOKENS = 1_000_000
"""Answers of a simulated engine while its steps are timed: none ends."""
_PROMPTS = 64
"""Of the job's; more are asked with other seeds."""
_SIMULATED_VOCABULARY = 256

Say = Callable[[str, Mapping[str, Any]], None]
"""Tells (what was measured, its fields as `record.py` names them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTask:
    """What is measured of a pool."""

    pool: str
    batches: tuple[int, ...]
    windows: int
    samples: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTask:
    """What is measured of the trainer."""

    groups: tuple[int, ...]
    repeats: int
    lengths: tuple[int, ...]
    deadline_s: float


def main(argv: Sequence[str]) -> int:
    """Measure one stage as the environment and the task say; the exit code."""
    role, task = argv
    output = console.own_output()
    measures: dict[str, Callable[[Mapping[str, Any], Say], None]] = {
        "decode": lambda given, say: decode(DecodeTask(**given), say=say),
        "train": lambda given, say: train(TrainTask(**given), say=say),
    }
    try:
        pin_to_cpus(os.environ)
        watch_parent(os.environ)
        measures[role](json.loads(task), lambda what, fields: _say(what, fields, output))
    except (UserError, UserErrors) as error:
        console.err(*error.lines)
        return EXIT_USER_ERROR
    except timing.TooSlowError as error:
        console.err(f"--deadline-seconds: was too short: {error}; raise it, or measure less at once")
        return EXIT_USER_ERROR
    except EngineFailedError as error:
        console.err(str(error))
        return EXIT_FAULT
    except MemoryError as error:
        console.err(f"out of memory: {error}")
        return EXIT_FAULT
    return EXIT_DONE


def _say(what: str, fields: Mapping[str, Any], output: TextIO) -> None:
    output.write(json.dumps([what, fields]) + "\n")
    output.flush()


def decode(task: DecodeTask, *, say: Say) -> None:
    """Answers of the initial model, then steps at each batch size."""
    spec = read_job(Path(required(os.environ, ENV_RUN_DIR)) / FILE_JOB).spec
    pool = next(pool for pool in spec.generators if pool.name == task.pool)
    clock = timing.WallClock(now_s=_clock(spec), sleep=time.sleep)
    sampling = pb.Sampling(**spec.task.sampling.model_dump())
    source = timing.RequestSource(prompts=_prompts(spec), sampling=sampling, seed=spec.seed)
    simulated = pool.engine.simulated is not None  # such an engine gives its answers at once
    made = _simulated(spec, pool, time_scale=0.0) if simulated else _loaded_engine(spec, pool)
    with contextlib.closing(made):
        answers = timing.measure_answers(made, source, samples=task.samples, deadline_s=task.deadline_s, clock=clock)
        lengths = [len(answer) for answer in answers.tokens]
        say("answers", {"tokens": lengths, "unfinished": answers.unfinished, "fill_milliseconds": 1e3 * answers.fill_s})
        engine = made
        if simulated:
            engine = _simulated(spec, pool, mean_tokens=float(_ENDLESS_TOKENS), sigma=0.0)
            source = replace(source, sampling=_endless(source.sampling))
        else:
            source = source.starting_within(answers.tokens)
        for batch in task.batches:
            windows = timing.measure_batch(
                engine,
                source,
                batch=batch,
                windows=task.windows,
                deadline_s=task.deadline_s,
                clock=clock,
                by_itself=pool.engine.common.own_processes,
            )
            milliseconds = _spread([1e3 * seconds for seconds in windows.seconds], unit="milliseconds")
            say("batch", {"batch": batch, "steps": windows.steps, **milliseconds})


def train(task: TrainTask, *, say: Say) -> None:
    """Steps of each number of groups."""
    from streamrl_workers.trainer.engines import create_engine
    from streamrl_workers.trainer.engines.process_group import ProcessGroup
    from streamrl_workers.trainer.engines.setup import EngineSetup
    from streamrl_workers.trainer.settings import read_settings

    settings = read_settings(os.environ)
    spec = settings.spec
    ranks = ProcessGroup(settings.rendezvous)
    try:
        setup = EngineSetup(
            spec=spec,
            model_path=settings.model_path,
            base_dir=settings.base_dir,
            plugin_dir=settings.plugin_dir,
            threads=settings.threads,
            env=settings.env,
            ranks=ranks.gather(),
        )
        engine = create_engine(setup)
        shape = _shape(spec, task=task, model_path=settings.model_path)
        say("ready", {"prompt_tokens": shape.prompt_tokens})
        for steps in timing.measure_steps(
            engine, shape, counts=task.groups, repeats=task.repeats, deadline_s=task.deadline_s, now_s=_clock(spec)
        ):
            measured = {"samples": steps.samples, "tokens": steps.tokens, "repeats": len(steps.seconds)}
            say("step", {**measured, **_spread(steps.seconds, unit="seconds")})
    finally:
        ranks.end()


def _spread(values: Sequence[float], *, unit: str) -> dict[str, float]:
    return {unit: median(values), f"lowest_{unit}": min(values), f"highest_{unit}": max(values)}


def _clock(spec: RLJobSpec) -> Callable[[], float]:
    """Seconds; on a GPU, once it has done what it was given: calls return before their kernels have run."""
    if not spec.has_model:
        return time.perf_counter
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter

    def now_s() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now_s


def _prompts(spec: RLJobSpec) -> list[str]:
    """Of the job's data set; a simulated engine does not read them, but draws a length for each."""
    if not spec.has_model:
        return [f"prompt {number}" for number in range(_PROMPTS)]
    from streamrl_workers.tasks.dataset import open_dataset

    model_path, base_dir = required(os.environ, ENV_MODEL_PATH), Path(required(os.environ, ENV_CODE_DIR))
    dataset = open_dataset(spec.task, seed=spec.seed, base_dir=base_dir, model_path=model_path)
    return [dataset.item("train", index).prompt for index in range(_PROMPTS)]


def _endless(given: pb.Sampling) -> pb.Sampling:
    sampling = pb.Sampling()
    sampling.CopyFrom(given)
    sampling.max_tokens = _ENDLESS_TOKENS
    sampling.ClearField("stop")
    return sampling


def _simulated(spec: RLJobSpec, pool: GeneratorPool, **changes: float) -> Engine:
    from streamrl_workers.generator.engines import create_simulated

    assert pool.engine.simulated is not None
    given = pool.engine.simulated.model_copy(update=changes)
    engine = create_simulated(EngineOptions(spec=given, seed=spec.seed))
    engine.load_weights(version=0, tensors={})
    return engine


def _loaded_engine(spec: RLJobSpec, pool: GeneratorPool) -> Engine:
    from streamrl_workers.generator.engines import engine_kind
    from streamrl_workers.models.load import load_model
    from streamrl_workers.models.published import Parameters
    from streamrl_workers.models.side_path import add_side_path

    model_path = required(os.environ, ENV_MODEL_PATH)
    options = EngineOptions(
        spec=pool.engine.value,
        model_path=model_path,
        threads=integer(os.environ, ENV_THREADS),
        add_special_tokens=not spec.task.has_chat,
        precision=spec.trainer.number_format,
        sherl=spec.trainer.sherl,
        lora=spec.trainer.unmerged_lora,
    )
    engine = engine_kind(pool.engine.key).create(options)
    model = load_model(model_path)
    if spec.trainer.number_format == "BF16":
        model.bfloat16()
    if spec.trainer.sherl is not None:
        add_side_path(model, spec.trainer.sherl)
    tensors = Parameters(model).snapshot()
    if spec.trainer.unmerged_lora is not None:
        from streamrl_workers.models.lora import add_adapters
        from streamrl_workers.trainer.engines import model_files

        add_adapters(model, spec.trainer.unmerged_lora)
        tensors |= model_files.tensors(model, trained=True)
    engine.load_weights(version=0, tensors=tensors)
    return engine


def _shape(spec: RLJobSpec, *, task: TrainTask, model_path: str | None) -> timing.Shape:
    group_size, seed = spec.task.group_size, spec.seed
    if model_path is None:
        return timing.Shape(
            group_size=group_size, prompt_tokens=1, lengths=task.lengths, vocabulary=_SIMULATED_VOCABULARY, seed=seed
        )
    from streamrl_workers.models.load import load_config, load_tokenizer

    tokenizer = load_tokenizer(model_path)
    prompts = _prompts(spec)
    prompt_tokens = max(1, round(fmean(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)))
    config = load_config(model_path).get_text_config()
    room = getattr(config, "max_position_embeddings", _ENDLESS_TOKENS) - prompt_tokens
    return timing.Shape(
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        lengths=tuple(max(1, min(length, room)) for length in task.lengths),
        vocabulary=config.vocab_size,
        seed=seed,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
