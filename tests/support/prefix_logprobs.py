"""What a policy is, from its definition: each token's log-prob by plain transformers on the tokens before it and nothing else."""

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel


def prefix_logprobs(
    model: PreTrainedModel, tokens: Sequence[int], *, places: Iterable[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the tokens at `places`, with gradient; one forward pass for each."""
    found = []
    for place in places:
        logits = model(input_ids=torch.tensor([tokens[:place]]), use_cache=False).logits[0, -1]
        found.append(torch.log_softmax(logits.float() / temperature, -1)[tokens[place]])
    return torch.stack(found)
