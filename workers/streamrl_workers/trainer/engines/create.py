"""Builds the torch engine from a job and a model folder."""

import torch

from streamrl.spec import RLJobSpec
from streamrl_workers.models.load import load_model, load_tokenizer
from streamrl_workers.trainer.algorithms import algorithm_creator
from streamrl_workers.trainer.engines.torch_engine import Parts, TorchEngine


def create(*, spec: RLJobSpec, model_path: str, threads: int | None) -> TorchEngine:
    """The engine with the initial weights, on the GPU where there is one."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(spec.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(model_path)
    model.to(device)  # type: ignore[arg-type] # transformers' decorated method confuses mypy
    parts = Parts(
        model=model,
        tokenizer=load_tokenizer(model_path),
        algorithm=algorithm_creator(spec.algorithm.key)(spec.algorithm.value),
    )
    return TorchEngine(parts, spec=spec)
