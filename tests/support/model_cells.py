"""What the product makes of a family of models, column by column: a figure, or the line with which it refuses.

    python -m support.model_cells FAMILY COLUMN ...     prints each cell as a line of JSON

Owns: how each cell is measured, and when a figure is wrong. Does not own: the families (`model_families.py`), the table (`tools/models.py`).
Each figure is against transformers alone with eager attention, of the folder that `save_pretrained` wrote.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.errors import UserError
from streamrl.spec.generators import HfEngineSpec, VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Delta, Engine, EngineOptions
from streamrl_workers.models.probe import Prover, take_probe
from streamrl_workers.models.published import Parameters, merged
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.forward import Forward
from streamrl_workers.trainer.engines.packing import PackedSample
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from streamrl_workers.weights.hashing import TensorBytes
from support.engine_requests import request, sampling
from support.model_families import save_tiny
from support.prefix_logprobs import gradients_of, prefix_logprobs, random_samples, samples_logprobs
from support.rank0 import act
from support.rank_team import RankTeam, tensors_in
from support.trainer_groups import trainer_spec

CLOSE = 1e-4
"""Largest difference of a log-prob, in nats, or of a gradient, as a share of the largest, that is right."""
CACHED = 5e-4
"""Of what an engine serves: for `qwen3_5_moe` transformers alone, with its cache, is 2e-4 from one whole pass; that is 4e-4 from float64."""
SAME_STEP = 1e-2
"""Largest difference of two ranks' step from one rank's, as a share of the step, that is right."""
VOCABULARY = 32  # of the groups that two ranks train
LENGTHS = ((9, 11), (6, 21), (12, 70))
"""Tokens of prompts and completions: within a window of 16, beyond it, and beyond 64, where linear attention begins its second chunk."""
PROMPTS = ("1+1=", "abcabc" * 3, "0123456789" * 3, "9" * 32, "8-3=" * 15)
GENERATED = 48
STEPS = 2
ROW_TOKENS = (13, 97)
"""Lengths of the rows whose tensors are watched: within a window of 16, and beyond it. No size of the models."""


class WrongError(Exception):
    """A figure that is wrong, and that the product did not refuse."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A tiny model of a family, in a folder of its own."""

    family: str
    path: Path

    @classmethod
    def make(cls, family: str, path: Path) -> "Folder":
        """Write the model and its tokenizer."""
        return cls(family, save_tiny(family, path / "model", vocab_size=VOCABULARY))

    def plain(self, path: Path | None = None) -> PreTrainedModel:
        """Load the model as transformers alone does."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path or self.path, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()  # type: ignore[no-untyped-call] # transformers'

    def other_weights(self, seed: int) -> PreTrainedModel:
        """Return the plain model with other random weights, so that an update is seen."""
        model = self.plain()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        return model


class Trainer:
    """A trainer of one rank."""

    def __init__(self, folder: Folder, **trainer: Any) -> None:
        self.spec = trainer_spec(**trainer)
        models = build_models(self.spec, model_path=str(folder.path), device=torch.device("cpu"))
        self.model = models.model
        self.worker = RankWorker(models, spec=self.spec)

    @cached_property
    def engine(self) -> TorchEngine:
        return TorchEngine(SingleRank(self.worker), spec=self.spec, algorithm=create_algorithm(self.spec))

    def logprobs(self, samples: list[PackedSample]) -> torch.Tensor:
        return Forward(self.model, temperature=1.0).logprobs(self.worker._batch(samples))

    def published(self) -> dict[str, TensorBytes]:
        """Return what generators get, with the proof of the first load."""
        return self.engine.tensors() | self.engine.probe()


def _right(difference: float, *, what: str, bound: float = CLOSE) -> float:
    if not difference <= bound:  # NaN is wrong
        raise WrongError(f"{what}: {difference:.1e}")
    return difference


def _largest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).detach().abs().max())


def trainer(folder: Folder, _scratch: Path) -> str:
    """Compare the trainer's log-probs and gradient."""
    plain, own, samples = folder.plain(), Trainer(folder), random_samples(LENGTHS, vocabulary=VOCABULARY)
    expected_N, found_N = samples_logprobs(plain, samples), own.logprobs(samples)
    logprobs = _right(_largest(found_N, expected_N), what="log-probs")
    own.model.zero_grad()
    expected, found = gradients_of(plain, expected_N), gradients_of(own.model, found_N)
    if missing := expected.keys() ^ found.keys():
        raise WrongError(f"gradient of {min(missing)} on one side alone")
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    gradient = max(_largest(found[name], wanted) for name, wanted in expected.items()) / scale
    return f"{logprobs:.0e}, {_right(gradient, what='gradient'):.0e}"


def hf(folder: Folder, _scratch: Path) -> str:
    """Compare what engine hf generates."""
    return _served(folder, name="hf", spec=HfEngineSpec.model_validate({"slots": 4}))


def vllm(folder: Folder, _scratch: Path) -> str:
    """Compare what engine vllm generates, before and after an update in place."""
    spec: dict[str, Any] = {"maxConcurrency": 4, "kvCacheBytes": "64Mi"}
    try:
        return _served(folder, name="vllm", spec=VllmEngineSpec.model_validate(spec))
    except UserError as error:
        if not error.lines[0].startswith("engine.vllm.prefixCaching:"):
            raise
    spec["prefixCaching"] = False
    return _served(folder, name="vllm", spec=VllmEngineSpec.model_validate(spec)) + ", with prefixCaching: false"


def _served(folder: Folder, *, name: str, spec: Any) -> str:
    """Prove the first load as a generator does; then compare under two versions."""
    tensors, probe = take_probe(Trainer(folder).published())
    assert probe is not None
    with closing(_engine(folder, name=name, spec=spec)) as engine:
        engine.load_weights(version=0, tensors=tensors)
        Prover(engine=name).prove(engine, probe)
        before = _right(_generated(engine, folder.plain()), what="before an update", bound=CACHED)
        other = folder.other_weights(seed=1)
        engine.load_weights(version=1, tensors=Parameters(other).snapshot())
        after = _right(_generated(engine, other), what="after an update", bound=CACHED)
    return f"{before:.0e}, {after:.0e}"


def _engine(folder: Folder, *, name: str, spec: Any) -> Engine:
    """Create an engine as a generator's process does, which makes a line of what a model lacks."""
    options = EngineOptions(spec=spec, model_path=str(folder.path), threads=1, max_tokens=GENERATED)
    try:
        return engine_kind(name).create(options)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(field=f"model {folder.path}", rule=f"cannot be loaded: {error}") from error


def _generated(engine: Engine, model: PreTrainedModel) -> float:
    """Return the largest difference over five requests in four slots."""
    waiting = [
        request(number, prompt, seed=number, limits=sampling(max_tokens=GENERATED - 6 * number))
        for number, prompt in enumerate(PROMPTS)
    ]
    gained: dict[int, list[Delta]] = defaultdict(list)
    while waiting or engine.active():
        admitted, waiting = waiting[: engine.free()], waiting[engine.free() :]
        for delta in [*engine.add(admitted), *engine.step()]:
            if delta.error is not None:
                raise WrongError(f"a sample failed: {delta.error}")
            gained[delta.lease].append(delta)
    return max(_difference(model, deltas) for deltas in gained.values())


@torch.inference_mode()
def _difference(model: PreTrainedModel, deltas: Sequence[Delta]) -> float:
    prompt = next(delta.prompt_tokens for delta in deltas if delta.prompt_tokens)
    tokens = [*prompt, *(token for delta in deltas for token in delta.tokens)]
    found = torch.tensor([logprob for delta in deltas for logprob in delta.logprobs])
    return _largest(found, prefix_logprobs(model, tokens, places=range(len(prompt), len(tokens))))


def lora(folder: Folder, _scratch: Path) -> str:
    """Compare trained adapters with what generators get, merged into a plain model."""
    own, plain, samples = (
        Trainer(folder, lora={"rank": 4}, learningRate=0.02),
        folder.plain(),
        random_samples(LENGTHS, vocabulary=VOCABULARY),
    )
    _train(own.engine)
    with torch.no_grad():
        before_N = samples_logprobs(plain, samples)
        Parameters(plain).load(merged(own.engine.tensors()))
        after_N, found_N = samples_logprobs(plain, samples), own.logprobs(samples)
    if _largest(after_N, before_N) < SAME_STEP:
        raise WrongError("adapters change nothing")
    return f"{_right(_largest(found_N, after_N), what='log-probs'):.0e}"


def _train(engine: Any) -> None:
    for step in range(STEPS):
        act(engine, {"do": "step", "step": step, "groups": 3})


def ranks(folder: Folder, scratch: Path) -> str:
    """Compare what two ranks and one rank make of the same steps: the difference as a share of what the steps change."""
    initial = dict(Parameters(folder.plain()).snapshot())
    one = Trainer(folder, microBatchTokens=32)
    _train(one.engine)
    alone = scratch / "one"
    alone.mkdir()
    expected = tensors_in(alone, act(one.engine, {"do": "tensors", "folder": alone}))
    with RankTeam(scratch / "two", size=2, model=folder.path, microBatchTokens=32) as team:
        try:
            team.answer()
        except AssertionError:
            raise _of_log(team) from None
        team.steps(STEPS)
        found = team.tensors("two")
        team.leave()
    moved = sum(float((tensor - _float(initial[name])).square().sum()) for name, tensor in expected.items())
    apart = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items())
    return f"{_right((apart / moved) ** 0.5, what='of the steps', bound=SAME_STEP):.0e}"


def _float(published: TensorBytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(published.data), dtype=torch.float32).view(published.shape)


def _of_log(team: RankTeam) -> Exception:
    """Return what ended the team: a user's line, or something else."""
    line = team.log(0).splitlines()[-1]
    if team.wait(0) != 2:
        return WrongError(f"rank 0 ended: {line}")
    field, _, rule = line.partition(": ")
    return UserError(field=field, rule=rule)


def export(folder: Folder, scratch: Path) -> str:
    """Load a trained model's export by transformers alone."""
    own, samples = Trainer(folder, learningRate=0.02), random_samples(LENGTHS, vocabulary=VOCABULARY)
    _train(own.engine)
    act(own.engine, {"do": "export", "folder": scratch / "export"})
    with torch.no_grad():
        expected_N = samples_logprobs(folder.plain(scratch / "export"), samples)
        return f"{_right(_largest(own.logprobs(samples), expected_N), what='log-probs'):.0e}"


class _Squares(TorchDispatchMode):
    """Notes whether a tensor of L x L was made."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        answer = func(*args, **(kwargs or {}))
        for tensor in answer if isinstance(answer, tuple | list) else [answer]:
            self.made |= isinstance(tensor, torch.Tensor) and tuple(tensor.shape).count(self._length) > 1
        return answer


def longest(folder: Folder, _scratch: Path) -> str:
    """Find up to which length the trainer makes no tensor of L x L, forward and back."""
    own = Trainer(folder)
    made = []
    for tokens in ROW_TOKENS:
        with _Squares(tokens) as squares:
            own.logprobs(
                random_samples([(4, tokens - 3)], vocabulary=VOCABULARY)
            ).sum().backward()  # the last token is no input
        made.append(squares.made)
    return {(False, False): "any", (False, True): "its window"}.get((made[0], made[1]), "none")


COLUMNS: dict[str, Callable[[Folder, Path], str]] = {
    "trainer": trainer,
    "hf": hf,
    "lora": lora,
    "export": export,
    "longest": longest,
    "ranks": ranks,
    "vllm": vllm,
}
"""By the name that the table uses, in the order in which they are measured."""


def cell(family: str, column: str) -> dict[str, str]:
    """Measure a cell: `state` is right, refused or wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return {"state": "right", "text": COLUMNS[column](Folder.make(family, Path(scratch)), Path(scratch))}
        except WrongError as error:
            return {"state": "wrong", "text": str(error)}
        except UserError as error:
            return {"state": "refused", "text": _line(error, scratch=scratch)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the product did not refuse by name
            return {"state": "wrong", "text": f"{type(error).__name__}: {error}".split("\n", 1)[0]}


def _line(error: UserError, *, scratch: str) -> str:
    return error.lines[0].replace(f"{scratch}/model", "FOLDER")


def main(family: str, *columns: str) -> None:
    """Print each cell."""
    torch.set_num_threads(1)
    for column in columns:
        sys.stdout.write(json.dumps({"column": column, **cell(family, column)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
