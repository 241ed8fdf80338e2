"""A small model from nothing: a character tokenizer and a Qwen3 of given sizes.

Owns the vocabulary's layout (pad, bos, eos, then the characters in code point order) and the seeded initial weights.
Does not train and does not write files; `warm_up` and `prepare` do.
Not Qwen2: for that model type AutoTokenizer ignores the saved tokenizer and puts its own rules over the vocabulary
(transformers 5.19, MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS), which drops what those rules join, as in `=-5`.
"""

from collections.abc import Set

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from streamrl.errors import UserError
from streamrl.spec.model import ScratchModel

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
_SPECIAL = (PAD, BOS, EOS)

_MAX_CHARACTERS = 4096
"""More distinct characters than this are no alphabet but a mistake in the data set."""

_INITIAL_STD = 0.02
"""Standard deviation of the initial weights: Qwen3's own."""


def build_tokenizer(characters: Set[str], *, max_positions: int) -> PreTrainedTokenizerFast:
    """One token per character; pad, bos and eos come first.

    Encoding adds no special token; another character is an error of the tokenizer, never a silent gap.
    """
    if not characters:
        raise UserError(field="spec.task.dataset", rule="must have a non-empty text to make a vocabulary from")
    if len(characters) > _MAX_CHARACTERS:
        raise UserError(
            field="spec.model.scratch",
            rule=f"makes a token of each character, at most {_MAX_CHARACTERS}",
            got=len(characters),
            fix="use spec.model.path or spec.model.huggingFace for such texts",
        )
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *sorted(characters)])}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # untyped in transformers
        tokenizer_object=_character_level(vocabulary),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(spec: ScratchModel, *, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32 with tied embeddings; the weights follow from `seed` alone, and torch's own state is left as it was."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        head_dim=spec.hidden_size // spec.heads,
        max_position_embeddings=spec.max_positions,
        initializer_range=_INITIAL_STD,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call] # untyped in transformers


def _character_level(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))  # noqa: S106 - not in the vocabulary on purpose
    # Not ".", which leaves line ends out; "isolated" makes a piece of every match.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
