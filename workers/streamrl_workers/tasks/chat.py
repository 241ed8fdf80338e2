"""Chat templates: how a question becomes the text that the model reads. The one door to tokenizers for tasks.

Owns the conversation [system?, user], or that of an agent, and the glue between turns. Prompts are tokenized by the generators, without
adding special tokens, since the template has put them in; those of a supervised job by `supervised/demonstrations.py`. Control strings
in people's texts are marked before a template sees them, so that they stay text (`stream/literals.py`). No torch: the
tokenizer is loaded by the class that needs none (`AutoTokenizer` imports torch: 700 MB and 7 s; this class 65 MB).
"""

import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UserError, shorten
from streamrl.spec.task import Chat
from streamrl_workers.agents.layouts import PROBE_CALL, PROBE_TOOL, Layout, layout_of, marked_layout, probe_message
from streamrl_workers.answer_ends import end_tokens, template_end
from streamrl_workers.answer_marks import AnswerText
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

_PROBE_TURN: Mapping[str, Any] = {"role": "user", "content": _PROBE}

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
        """`ends`: tokens that end a turn of the model, each with its text."""
        self._tokenizer = tokenizer
        self.ends = ends
        self._literals = Literals(tokenizer.backend_tokenizer)
        system = self._literals.of_model(chat.system_prompt)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._arguments = dict(chat.template_arguments)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    def prompt(self, question: str) -> str:
        """System and user turn, and the beginning of the model's. Raises `UserError` if the template refuses."""
        return self.conversation([{"role": "user", "content": question}])

    def conversation(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """Turns of a conversation that begins, and the beginning of the model's. Raises `UserError` if the template refuses."""
        return self._render(self._formed(messages), tools=tools)

    def observation(self, text: str, *, end: str) -> str:
        """What stands between two turns of the model: the end of the first, the environment's `text` as a user's turn, the beginning of the next.

        `end`: the end token that the model's turn has, which stands in the sequence already; "" if the turn ended otherwise.
        Raises `UserError` if the template refuses.
        """
        glue = self.continuation([{"role": "user", "content": text}])
        return self.without_end(glue, end=end) if end else glue

    def continuation(self, messages: Sequence[Message], *, tools: Tools = (), calls: Tools = ()) -> str:
        """What stands between two turns of the model: the end of the first, these messages, the beginning of the next.

        `calls`: those of the first turn, for a template that refuses a tool's message without them.
        Raises `UserError` if the template refuses.
        """
        turn = {"role": "assistant", "content": _MARK}
        try:
            _, mark, glue = self._render([_PROBE_TURN, turn, *messages], tools=tools).partition(_MARK)
        except UserError:
            if not calls:
                raise
            return self._after_calls(messages, tools=tools, calls=calls)
        if not mark:
            raise UserError(field=FIELD, rule="the chat template drops earlier turns of the model; turns need them")
        return glue

    def _after_calls(self, messages: Sequence[Message], *, tools: Tools, calls: Tools) -> str:
        turns = self._formed([_PROBE_TURN, {"role": "assistant", "content": "", "tool_calls": calls}])
        before = self._render(turns, tools=tools, is_open=False)
        whole = self._render([*turns, *messages], tools=tools)
        if not whole.startswith(before):
            raise UserError(field=FIELD, rule="the chat template writes a turn with tool calls otherwise later")
        end = re.search(rf"(?:{self._special.pattern})\s*\Z", before)
        return whole[len(before) if end is None else end.start() :]

    def without_end(self, glue: str, *, end: str) -> str:
        """What follows a turn that has ended with this end token, which stands in the sequence already.

        A template may close a turn by another token than the model has: it is left out, too, if a control token follows it.
        If text follows, the token begins the next message: GLM's turns end with the `<|user|>` of the next.
        """
        left = glue.lstrip()  # a template may set a space before it, as Llama 2's does
        for known in (end, self._written_end):
            if known and left.startswith(known):
                return left.removeprefix(known)
        closing = self._special.match(left)
        if closing is None or not self._special.match(left[closing.end() :].lstrip()):
            return glue
        return left[closing.end() :]

    @functools.cached_property
    def _written_end(self) -> str:
        """Return the end token that the template writes after the last turn; "" if it writes none."""
        written = template_end(self._tokenizer)
        return str(self._tokenizer.convert_ids_to_tokens(written[-1])) if written else ""

    # ---- tool calls

    @property
    def layout(self) -> Layout:
        """How the template writes tool calls. Raises `UserError` if that is in no known layout."""
        return self._call_form[0]

    @functools.cached_property
    def _call_form(self) -> tuple[Layout, bool]:
        """Return the layout of calls, and whether the template reads their arguments as a text."""
        written, refusals = "", []
        for as_text in (False, True):
            try:
                written = self._written_call(as_text=as_text)
            except UserError as error:
                refusals.append(error)
                continue
            if (layout := layout_of(written)) is not None:
                return layout, as_text
        if len(refusals) == 2:  # noqa: PLR2004 - both forms
            raise refusals[0]
        if PROBE_CALL[0] in written:
            rule = "the chat template writes tool calls in a layout that is not read"
            fix = "take a model whose layout docs/agents.md names, or describe tools in a message"
            raise UserError(field=FIELD, rule=rule, got=written, fix=fix)
        return marked_layout(self._tokenizer.get_added_vocab()), False

    def _written_call(self, *, as_text: bool) -> str:
        """Return the text of a turn with the probe's call, as an engine would give it."""
        plain, calling = (
            self._render([_PROBE_TURN, turn], tools=[PROBE_TOOL], is_open=False)
            for turn in ({"role": "assistant", "content": _MARK}, probe_message(as_text=as_text))
        )
        begin = len(os.path.commonprefix([plain.partition(_MARK)[0], calling]))  # noqa: RUF071 - strings, no paths
        tokens = self._tokenizer(calling[begin:], add_special_tokens=False)["input_ids"]
        said = itertools.takewhile(lambda token: token not in self.ends, tokens)
        return AnswerText(self._tokenizer, ends=self.ends).of(said)

    def _formed(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose calls have arguments in the form that the template reads."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        try:
            as_text = self._call_form[1]
        except UserError:
            as_text = False
        return [_with_texts(message) if as_text else message for message in messages]

    def _render(self, messages: Sequence[Message], *, tools: Tools, is_open: bool = True) -> str:
        arguments: dict[str, Any] = self._arguments
        if tools:
            arguments = arguments | {"tools": self._literals.of_people(list(tools))}
        try:
            text = self._tokenizer.apply_chat_template(
                [*self._system, *map(self._marked, messages)],
                tokenize=False,
                add_generation_prompt=is_open,
                **arguments,
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


def _with_texts(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if calls else message


def _with_text(call: Message) -> Message:
    function = call["function"]
    if isinstance(arguments := function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_POSITIONS = ("max_position_embeddings", "n_positions")
"""As most models call them, and as GPT-2, GPT-J and others do."""


def positions_of(config: Any) -> int | None:  # noqa: ANN401 - JSON
    """What a model's configuration says, of its text part where it has several; None: nothing, or nothing sensible."""
    parts = (config, config.get("text_config")) if isinstance(config, dict) else ()
    found = (part.get(name) for part in parts if isinstance(part, dict) for name in _POSITIONS)
    return next((positions for positions in found if isinstance(positions, int)), None)
