"""Lengths by trying: a model completes prompts with the engine `hf`, and tokens are counted."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import HfEngineSpec
from streamrl_cli.generate import chat_of, in_chat, model_directory
from streamrl_cli.ranker import PromptLength
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.engines.hf.engine import create
from streamrl_workers.generator.engines.hf.parameters import Parameters
from streamrl_workers.models.load import load_model


class Sampler:
    """A model folder in the engine. A run's model gets prompts in the chat template that it was trained with."""

    def __init__(self, checkpoint: Path, *, slots: int, max_tokens: int, temperature: float, seed: int) -> None:
        """Load it. Raises `UserError` if it cannot be."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # untyped in transformers
        self._directory = model_directory(checkpoint)
        self._chat = chat_of(checkpoint)
        path = str(self._directory)
        self._engine = create(
            EngineOptions(spec=HfEngineSpec(slots=slots), model_path=path, add_special_tokens=self._chat is None)
        )
        self._engine.load_weights(version=0, tensors=Parameters(load_model(path)).snapshot())
        self._sampling = pb.Sampling(temperature=temperature, top_p=1.0, max_tokens=max_tokens)
        self._seed = seed

    def pairs(self, prompts: Sequence[str], *, samples: int) -> Iterator[PromptLength]:
        """One for each completion, as they finish; prompts that do not fit the model are left out."""
        read = in_chat(prompts, chat=self._chat, directory=self._directory)
        waiting = self._requests(read, samples=samples)
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
                        yield PromptLength(read[delta.lease // samples], count)

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
