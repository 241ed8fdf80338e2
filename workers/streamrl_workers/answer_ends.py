"""Tokens at which an answer of a model ends. The one place that says it: engines, chat, agents, supervised rows and warm-up ask here.

An answer ends at the end tokens of `generation_config.json`, of `config.json` and of the tokenizer, and at the end of turn that the chat
template writes. The template's counts whether or not a task has `chat`: prompts may hold the template's text already, and no answer goes on
after the end of its turn. So a process needs the model's directory alone, and all processes find the same tokens.

Knows neither torch nor transformers: the caller loads the tokenizer. Does not own stop strings (`generator/engines/requests.py`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.files import MissingFileError, read_json

Tokenizer = Any
"""A tokenizer of transformers, of any class."""

_FILES = ("generation_config.json", "config.json")
_ANSWER = "streamrlanswer"
"""An answer that no template changes: what follows it is the end of the turn."""


def end_tokens(directory: Path, tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens at which an answer ends, each with its text.

    Args:
        directory: the model's, with its configuration; a file that is missing names no token.
        tokenizer: that of the model. Token ids that it does not have are left out.

    Raises `UserError`: a configuration cannot be read.
    """
    ids = [tokenizer.eos_token_id, *(number for name in _FILES for number in _named(directory / name))]
    ids += template_end(tokenizer)[-1:]
    known = range(len(tokenizer))
    return {
        number: str(tokenizer.convert_ids_to_tokens(number))
        for number in ids
        if type(number) is int and number in known
    }


def written_end(tokenizer: Tokenizer, *, chat: bool) -> tuple[int, ...]:
    """Return the tokens to learn after an answer, empty if there is no end token: with `chat` what the template writes, else the tokenizer's."""
    end = template_end(tokenizer) if chat else ()
    return end or tuple(number for number in (tokenizer.eos_token_id,) if number is not None)


def template_end(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return what the chat template writes after an answer, up to and including the token that ends the turn.

    That is its first added token: a line break after it stands between two turns, and a model that has ended never writes it.
    Empty if there is no template, if it writes no such token, or if it refuses a plain conversation.
    """
    if not tokenizer.chat_template:
        return ()
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        after: Sequence[int] = tokenizer(text.partition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    except Exception:  # noqa: BLE001 - whatever the template's code raises; `tasks/chat.py` reports it where a task has `chat`
        return ()
    end = next((place for place, token in enumerate(after) if token in tokenizer.added_tokens_decoder), None)
    return () if end is None else tuple(after[: end + 1])


def _named(file: Path) -> Iterator[Any]:
    """Yield what a configuration has as `eos_token_id`, its text part included."""
    try:
        config = read_json(file)
    except MissingFileError:
        return
    parts = (config, config.get("text_config")) if isinstance(config, dict) else ()
    for named in (part.get("eos_token_id") for part in parts if isinstance(part, dict)):
        yield from named if isinstance(named, list) else [named]
