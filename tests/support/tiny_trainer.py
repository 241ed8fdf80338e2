"""A torch engine around a model of two small layers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl.spec.algorithm import UtteranceCritic
from streamrl_workers.models.documents import Documents, attend_by_document
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.algorithms.algorithm import Algorithm
from streamrl_workers.trainer.engines.forward import UtteranceValueModel, ValueModel
from streamrl_workers.trainer.engines.pass_memory import PassMemory
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, frozen
from streamrl_workers.trainer.engines.worker import RankModels, RankWorker
from streamrl_workers.weights.hashing import tensors_hash

VOCABULARY = 32
REFERENCE_SEED = 5
"""The reference differs from the policy, as it does behind the first step."""
CRITIC_SEED = 6


def tiny_model(seed: int = 0, hidden_size: int = 16) -> Qwen2ForCausalLM:
    """Random weights, wide enough for log-probs that differ."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ..."""
    words = {f"w{n}": n for n in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))


def tiny_critic(kind: type[ValueModel] = ValueModel) -> ValueModel:
    """A value model whose head is not zero, so that values differ; those of a copy are others again."""
    model = tiny_model(CRITIC_SEED)
    attend_by_document(model)
    critic = kind.of(model)
    torch.nn.init.normal_(critic.head.weight, std=0.3)
    if isinstance(critic, UtteranceValueModel):
        torch.nn.init.normal_(critic.target.head.weight, std=0.3)
    return critic.eval()


def _policy(seed: int = 0, hidden_size: int = 16) -> Qwen2ForCausalLM:
    model = tiny_model(seed, hidden_size)
    attend_by_document(model)
    answer_logprobs(model)
    return model


def tiny_worker(spec: RLJobSpec, *, memory: PassMemory | None = None, **model: int) -> RankWorker:
    """The only rank."""
    algorithm = create_algorithm(spec)
    parts = RankModels(
        model=_policy(**model),
        tokenizer=tiny_tokenizer(),
        algorithm=algorithm,
        reference=frozen(_policy(REFERENCE_SEED)) if algorithm.reference_kl and not spec.trainer.reference else None,
        critic=_critic_of(algorithm),
    )
    return RankWorker(parts, spec=spec, memory=memory)


def gpu_error() -> None:
    """Raise what a GPU without memory raises."""
    raise torch.OutOfMemoryError("injected")


def narrow_worker(
    spec: RLJobSpec, *, rows: int, error: Callable[[], None] = gpu_error, memory: PassMemory | None = None
) -> RankWorker:
    """A worker whose policy takes at most `rows` sequences at once."""
    worker = tiny_worker(spec, memory=memory)
    model = worker._model
    wide: Callable[..., Any] = model.forward

    def forward(inputs_BL: torch.Tensor, *, documents: Documents, **rest: Any) -> Any:
        if len(documents.begins) - 1 > rows:
            error()
        return wide(inputs_BL, documents=documents, **rest)

    model.forward = forward
    return worker


def _critic_of(algorithm: Algorithm) -> ValueModel | None:
    if algorithm.critic is None:
        return None
    return tiny_critic(UtteranceValueModel if isinstance(algorithm.critic, UtteranceCritic) else ValueModel)


def tiny_engine(spec: RLJobSpec, **model: int) -> TorchEngine:
    """The engine on one rank."""
    return engine_on(tiny_worker(spec, **model), spec=spec)


def engine_on(worker: RankWorker, *, spec: RLJobSpec) -> TorchEngine:
    """The engine around a worker whose gradients a test looks at."""
    return TorchEngine(SingleRank(worker), spec=spec, algorithm=create_algorithm(spec))


def train_steps(engine: TorchEngine, steps: Sequence[Sequence[pb.Group]], *, first: int = 0) -> list[dict[str, float]]:
    """Train these steps' groups, each step in one piece; the metrics of each."""
    metrics = []
    for step, groups in enumerate(steps, start=first):
        engine.begin_step(step, attempt=1)
        engine.add(groups)
        metrics.append(engine.finish_step())
    return metrics


def assert_resumes(spec: RLJobSpec, steps: Sequence[Sequence[pb.Group]], *, saved_at: int, folder: Path) -> None:
    """A run that is killed at a checkpoint goes on as if it had not been: the same metrics and weights, bit for bit."""
    whole, killed, resumed = (tiny_engine(spec) for _ in range(3))
    expected = train_steps(whole, steps)
    train_steps(killed, steps[:saved_at])
    killed.save(folder).result()
    resumed.load(folder)
    assert train_steps(resumed, steps[saved_at:], first=saved_at) == expected[saved_at:]
    assert tensors_hash(resumed.tensors()) == tensors_hash(whole.tensors())
