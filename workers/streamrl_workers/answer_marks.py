"""Special tokens that stay in the text of an answer, because they mark its thoughts, its channels and its tool calls.

All other special tokens are left out of texts. Engines, agents and logged answers ask here, so that all of them read the same text.
Knows neither torch nor transformers: the caller loads the tokenizer. Does not own what marks mean (`agents/layouts.py`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

Tokenizer = Any
"""A tokenizer of transformers, of any class."""

CONTENT_MARKS = frozenset(
    {
        *("<think>", "</think>", "[THINK]", "[/THINK]"),
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    }
)
"""Marks inside a message, as the tokenizers of DeepSeek, GLM, Granite, LFM2, Llama, Mistral, Phi-4 and Qwen write them."""
MARKS = CONTENT_MARKS | {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"}
"""With those between the messages of one turn, which GPT-OSS has. A message that holds one could end itself, so it stays text there."""


class AnswerText:
    """Decodes answers."""

    def __init__(self, tokenizer: Tokenizer, *, ends: Iterable[int] = ()) -> None:
        """`ends`: tokens that end an answer; a special one is left out even if it is a mark."""
        self._tokenizer = tokenizer
        ended = frozenset(ends)
        self._hidden = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and (number in ended or token.content not in MARKS)
        }

    @property
    def hidden(self) -> Sequence[str]:
        """Special tokens that texts are without."""
        return tuple(self._hidden.values())

    def of(self, tokens: Iterable[int]) -> str:
        """Return the text of an answer."""
        return self.whole([token for token in tokens if token not in self._hidden])

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text with all special tokens."""
        text: Any = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
