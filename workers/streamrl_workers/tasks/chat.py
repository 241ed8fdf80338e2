"""Chat templates: how a question becomes the text that the model reads. The one door to tokenizers for tasks.

Owns the conversation [system?, user], or that of an agent, and the glue between turns. Prompts are tokenized by the generators, without
adding special tokens, since the template has put them in; those of a supervised job by `supervised/demonstrations.py`. Control strings
in people's texts are marked before a template sees them, so that they stay text (`stream/literals.py`). No torch: the
tokenizer is loaded by the class that needs none (`AutoTokenizer` imports torch: 700 MB and 7 s; this class 65 MB).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UserError, shorten
from streamrl.spec.task import Chat
from streamrl_workers.answer_ends import end_tokens
from streamrl_workers.stream.literals import Literals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    FastTokenizer = PreTrainedTokenizerFast

FIELD = "spec.task.chat"
RESERVED_ARGUMENTS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
)
"""Arguments that are ours; the template's own go by `templateArguments`."""

_MARK = "streamrlturnends"
"""A turn of the model that no template changes: what follows it is the glue."""
_PROBE = "x"
"""Some question that does not hold the mark."""

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""As OpenAI's API describes them."""


def open_chat(chat: Chat, *, model_path: str) -> "ChatTemplate":
    """The chat template of the tokenizer in the directory `model_path`; tries it once.

    Raises:
        UserError: there is no tokenizer or no template, or it refuses the system turn or the arguments.
    """
    for name in RESERVED_ARGUMENTS:
        if name in chat.template_arguments:
            raise UserError(field=f"{FIELD}.templateArguments.{name}", rule="is set by the run", fix="remove it")
    tokenizer = _load(model_path)
    template = ChatTemplate(tokenizer, chat=chat, ends=end_tokens(Path(model_path), tokenizer))
    if _PROBE not in template.prompt(_PROBE):
        raise UserError(field=FIELD, rule="the tokenizer's chat template leaves the user's text out", got=model_path)
    return template


def _load(model_path: str) -> "PreTrainedTokenizerFast":
    if not model_path:
        raise UserError(field=FIELD, rule="needs a model with a tokenizer, and this run has none", fix="remove chat")
    tokenizer = load_fast_tokenizer(model_path, field=FIELD)
    if not tokenizer.chat_template:
        raise UserError(
            field=FIELD,
            rule="needs a tokenizer with a chat template, and this one has none",
            got=model_path,
            fix="take an instruction-tuned model, or remove chat",
        )
    return tokenizer


def load_fast_tokenizer(model_path: str, *, field: str) -> "PreTrainedTokenizerFast":
    """The tokenizer in the directory `model_path`, without torch. Raises `UserError` if there is none; `field` is who needs it."""
    from transformers import PreTrainedTokenizerFast

    try:
        loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # a broken file surfaces as any exception at all, a bare one of the tokenizers' Rust too
        raise UserError(
            field=field,
            rule=f"the tokenizer cannot be loaded: {type(error).__name__}: {shorten(_one_line(error))}",
            got=model_path,
            fix="save it with save_pretrained, so that tokenizer.json is there",
        ) from error
    return loaded


class ChatTemplate:
    """Renders conversations; every method is pure."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, chat: Chat, ends: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._literals = Literals(tokenizer.backend_tokenizer)
        system = self._literals.of_model(chat.system_prompt)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._arguments = dict(chat.template_arguments)
        self._ends = ends

    def prompt(self, question: str) -> str:
        """System and user turn, and the beginning of the model's. Raises `UserError` if the template refuses."""
        return self.conversation([{"role": "user", "content": question}])

    def conversation(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """Turns of a conversation that begins, and the beginning of the model's. Raises `UserError` if the template refuses."""
        return self._render(messages, tools=tools)

    def ends_turn(self, token_id: int) -> bool:
        """Whether a turn of the model whose last token is this one has ended by itself."""
        return token_id in self._ends

    def observation(self, text: str, *, ended: bool) -> str:
        """What stands between two turns of the model: the end of the first, the environment's `text` as a user's turn, the beginning of the next.

        `ended`: the model's turn ended with its end token, which stands in the sequence already and is left out here.
        Raises `UserError` if the template refuses.
        """
        glue = self.continuation([{"role": "user", "content": text}])
        return self.without_end(glue) if ended else glue

    def continuation(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """What stands between two turns of the model: the end of the first, these messages, the beginning of the next.

        Raises `UserError` if the template refuses.
        """
        turns: list[Message] = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _MARK}]
        _, mark, glue = self._render([*turns, *messages], tools=tools).partition(_MARK)
        if not mark:
            raise UserError(field=FIELD, rule="the chat template drops earlier turns of the model; turns need them")
        return glue

    def without_end(self, glue: str) -> str:
        """What follows a turn of the model that has ended with its end token: that stands in the sequence already."""
        for end in self._ends.values():
            before, found, after = glue.partition(end)
            if found and not before.strip():  # a template may set a space before it, as Llama 2's does
                return after
        return glue

    def _render(self, messages: Sequence[Message], *, tools: Tools) -> str:
        arguments: dict[str, Any] = self._arguments
        if tools:
            arguments = arguments | {"tools": self._literals.of_people(list(tools))}
        try:
            text = self._tokenizer.apply_chat_template(
                [*self._system, *map(self._marked, messages)], tokenize=False, add_generation_prompt=True, **arguments
            )
        except Exception as error:  # jinja's, or whatever the template's own code raises
            raise UserError(
                field=FIELD,
                rule=f"the chat template refuses the conversation: {type(error).__name__}: {shorten(_one_line(error))}",
                fix="change systemPrompt or templateArguments",
            ) from error
        return str(text)

    def _marked(self, message: Message) -> dict[str, Any]:
        mark = self._literals.of_model if message["role"] == "assistant" else self._literals.of_people
        return {**mark(message), "role": message["role"]}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_POSITIONS = ("max_position_embeddings", "n_positions")
"""As most models call them, and as GPT-2, GPT-J and others do."""


def positions_of(config: Any) -> int | None:  # noqa: ANN401 - JSON
    """What a model's configuration says, of its text part where it has several; None: nothing, or nothing sensible."""
    parts = (config, config.get("text_config")) if isinstance(config, dict) else ()
    found = (part.get(name) for part in parts if isinstance(part, dict) for name in _POSITIONS)
    return next((positions for positions in found if isinstance(positions, int)), None)
