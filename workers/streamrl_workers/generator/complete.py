"""Completes a few prompts with a model folder and the `hf` engine, in this process. Owns no link and no metrics."""

from collections.abc import Sequence

from transformers.utils import logging as transformers_logging

from streamrl_workers.generator.engine import Request, Sampling
from streamrl_workers.generator.engines.hf.create import build
from streamrl_workers.generator.engines.hf.parameters import Parameters
from streamrl_workers.models.load import load_model, load_tokenizer

MOST_SLOTS = 64
"""More prompts than this take turns."""


def complete(
    prompts: Sequence[str], *, model_path: str, sampling: Sampling, seed: int, add_special_tokens: bool = True
) -> list[str]:
    """Completion of each prompt, in their order. `add_special_tokens`: to prompts, as the tokenizer does.

    Raises:
        UserError: the model cannot be loaded, or a prompt does not fit it.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # untyped in transformers
    model = load_model(model_path)
    weights = Parameters(model).snapshot()
    engine = build(
        model=model,
        tokenizer=load_tokenizer(model_path),
        slots=min(MOST_SLOTS, len(prompts)),
        max_total_tokens=None,
        add_special_tokens=add_special_tokens,
    )
    engine.load_weights(version=0, tensors=weights)
    waiting = [
        Request(request_id=i, group_id=i, prompt=p, prefix_tokens=(), sampling=sampling, seed=seed + i, pinned=False)
        for i, p in enumerate(prompts)
    ]
    texts: dict[int, str] = {}
    while len(texts) < len(prompts):
        admitted, waiting = waiting[: engine.free()], waiting[engine.free() :]
        for delta in [*engine.add(admitted), *engine.step()]:
            if delta.finish_reason is not None:
                texts[delta.request_id] = delta.text or "" if delta.error is None else f" [{delta.error}]"
    return [texts[i] for i in range(len(prompts))]
