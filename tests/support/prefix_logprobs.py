"""What a policy is, from its definition: each token's log-prob by plain transformers on the tokens before it and nothing else."""

import random
from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.trainer.engines.packing import PackedSample, pack_sample


def prefix_logprobs(
    model: PreTrainedModel, tokens: Sequence[int], *, places: Iterable[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the tokens at `places`, with gradient; one forward pass for each."""
    found = []
    for place in places:
        logits = model(input_ids=torch.tensor([tokens[:place]]), use_cache=False).logits[0, -1]
        found.append(torch.log_softmax(logits.float() / temperature, -1)[tokens[place]])
    return torch.stack(found)


def samples_logprobs(
    model: PreTrainedModel, samples: Sequence[PackedSample], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of all places of the samples, in their order, with gradient."""
    return torch.cat(
        [prefix_logprobs(model, one.tokens, places=one.places_N, temperature=temperature) for one in samples]
    )


def gradients_of(model: PreTrainedModel, logprobs_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of a random sum of the log-probs, by name of the parameter; it adds to what is there."""
    weights_N = torch.randn(len(logprobs_N), generator=torch.Generator().manual_seed(3))
    (logprobs_N * weights_N).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def random_samples(lengths: Sequence[tuple[int, int]], *, vocabulary: int) -> list[PackedSample]:
    """Samples of random tokens, by tokens of prompt and completion."""
    rng = random.Random(5)
    samples = []
    for index, (prompt, completion) in enumerate(lengths):
        tokens = [[rng.randrange(vocabulary) for _ in range(count)] for count in (prompt, completion)]
        sample = pb.Sample(
            sample_index=index,
            prompt_tokens=pack_int32(tokens[0]),
            tokens=pack_int32(tokens[1]),
            logprobs=pack_float32([0.0] * completion),
            spans=[pb.VersionSpan(tokens=completion, step=0, attempt=1)],
        )
        samples += pack_sample(sample, step=0, attempt=1)
    return samples
