"""What a program's requests say to the model, and what the model's text says to the program. Pure.

Owns: which requests are understood, whether one continues those before it, and the text that it adds. Does not tokenize, does not
wait, does not know how models write tool calls (`layouts.py`). Arguments are JSON: no `NaN`, no number beyond a double.

Invariant: a request that continues begins with the messages of the one before and with the answer as it was given. What stands
behind follows the tokens that were sampled, so nothing that the model wrote is tokenized again. Any other request begins a new
context, of which all is text (docs/decisions/0060-branches.md). Messages are kept as digests: 16 bytes each.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal, Protocol

from streamrl.errors import UserError, shorten
from streamrl_workers.agents.json_values import check_text, parsed
from streamrl_workers.agents.layouts import Layout, TurnParts, read_channels
from streamrl_workers.rewards.registry import BadValueError

BAD_REQUEST = 400
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""A request's -> the template's."""
_THINK = "<think>"
_REASONING = ("reasoning_content", "thinking")
"""Names by which templates read the thoughts of an earlier turn."""
_REFUSED = {
    "logprobs": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "n": (None, 1),
}
"""Fields that change what an answer is -> values that are the same as none."""

Message = Mapping[str, Any]


class BadRequestError(ValueError):
    """A request that gets an error and changes nothing: the program may ask another time."""

    def __init__(
        self, text: str, *, status: int = BAD_REQUEST, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code


class ToolsRefusedError(BadRequestError):
    """A request with tools that the model could not use by its chat template."""

    def __init__(self, error: UserError) -> None:
        self.user_error = error
        super().__init__(str(error), param="tools")


_TOOLS_IGNORED = UserError(
    field="spec.task.chat",
    rule="the tokenizer's chat template ignores tools, and the agent's request has some",
    fix="take a model whose template renders tools, or describe them in a message",
)


class EditedError(BadValueError):
    """A request that does not continue what has been."""


class MessageTemplate(Protocol):
    """How messages become text: a model's chat template, or plainly."""

    @property
    def ends(self) -> Mapping[int, str]:
        """Tokens that end a turn of the model, each with its text."""

    @property
    def layout(self) -> Layout:
        """How the model writes calls. Raises `UserError` if that is not known."""

    def conversation(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> str:
        """The messages of a conversation that begins, and the beginning of the model's."""

    def continuation(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), calls: Sequence[Message] = ()
    ) -> str:
        """What follows a turn of the model that has not ended: its end, the messages, the beginning of the next. `calls`: the turn's."""

    def without_end(self, glue: str, *, end: str) -> str:
        """What follows a turn that has ended with this end token."""


class PlainTemplate:
    """A task without `chat`: contents as they are, nothing between them."""

    ends: Mapping[int, str] = {}

    @property
    def layout(self) -> Layout:
        """There is none: a request with tools is refused before."""
        raise AssertionError("no tools without a chat template")

    def conversation(self, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> str:
        """The contents."""
        if tools:
            raise BadRequestError("tools need task.chat: a chat template shows them to the model", param="tools")
        return "".join(message["content"] for message in messages)

    def continuation(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), calls: Sequence[Message] = ()
    ) -> str:
        """The contents."""
        del calls
        return self.conversation(messages, tools=tools)

    def without_end(self, glue: str, *, end: str) -> str:
        """There is no end token to leave out."""
        del end
        return glue


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, understood."""

    kind: Literal["chat", "text"]
    model: str
    stream: bool = False
    stream_usage: bool = False
    messages: tuple[Message, ...] = ()
    """Of a chat."""
    tools: tuple[Message, ...] = ()
    prompt: str = ""
    """Of a text completion."""

    @property
    def digest(self) -> bytes:
        """Of what it asks."""
        return _digest([self.kind, self.messages, self.tools, self.prompt])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the model reads before its next turn."""

    text: str
    context: bool = False
    """It is the prompt of a new context: the model sees nothing of what was before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model said."""

    text: str
    finish_reason: str = "stop"
    """`stop` or `length`."""
    context_tokens: int = 0
    """Before it."""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model calls."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn of the model as its program gets it."""

    turn: Turn
    number: int
    """Of the turn, from 1."""
    content: str
    reasoning: str = ""
    """What a model that thinks in a channel of its own thought; other models' thoughts are part of the content."""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def finish_reason(self) -> str:
        """As OpenAI's API names it."""
        return "tool_calls" if self.tool_calls else self.turn.finish_reason


# ---- requests


def parse_chat(body: bytes) -> Ask:
    """A request for a chat's next message. Raises `BadRequestError`."""
    return chat_ask(json_object(body))


def chat_ask(value: Mapping[str, Any]) -> Ask:
    """The same, as an object. Raises `BadRequestError`."""
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message", param="messages")
    tools = value.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequestError("tools must be a list of objects", param="tools")
    options = value.get("stream_options")
    return Ask(
        kind="chat",
        model=_model(value),
        stream=bool(value.get("stream")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        messages=tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages)),
        tools=tuple(tools),
    )


def parse_text(body: bytes) -> Ask:
    """A request for the continuation of a text. Raises `BadRequestError`."""
    value = json_object(body)
    match value.get("prompt"):
        case str(prompt) | [str(prompt)]:
            return Ask(kind="text", model=_model(value), stream=bool(value.get("stream")), prompt=prompt)
    raise BadRequestError("prompt must be one text", param="prompt")


def parse_reward(body: bytes) -> float:
    """A number that the turn earned. Raises `BadRequestError`."""
    reward = json_object(body).get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
        raise BadRequestError(f"reward must be a finite number, got {shorten(reward)}", param="reward")
    return float(reward)


def parse_end(body: bytes) -> str:
    """Why the sample has failed; "" where it has not. Raises `BadRequestError`."""
    error = json_object(body or b"{}").get("error") or ""
    if not isinstance(error, str):
        raise BadRequestError(f"error must be a text, got {shorten(error)}", param="error")
    return " ".join(error.split())


def json_object(body: bytes) -> dict[str, Any]:
    """A request's body. Raises `BadRequestError`."""
    try:
        value = json.loads(body)
        check_text(value)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body must be JSON in UTF-8: {shorten(str(error))}") from None
    if not isinstance(value, dict):
        raise BadRequestError("the body must be a JSON object")
    for name, same in _REFUSED.items():
        if value.get(name) not in same:
            raise BadRequestError(f"{name} is not supported: there is one answer, with its text alone", param=name)
    return value


def _model(value: Mapping[str, Any]) -> str:
    model = value.get("model")
    return model if isinstance(model, str) else "policy"


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        raise BadRequestError(f"{place} must be an object with a role: {', '.join(ROLES)}", param="messages")
    message: dict[str, Any] = {"role": ROLES[value["role"]], "content": _content(value.get("content"), place)}
    if calls := value.get("tool_calls"):
        message["tool_calls"] = [_call(call, place) for call in _list(calls, place)]
    if isinstance(reasoning := value.get("reasoning_content"), str):
        message |= dict.fromkeys(_REASONING, reasoning)
    return message | {name: value[name] for name in ("tool_call_id", "name") if isinstance(value.get(name), str)}


def _content(value: object, place: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for part in _list(value, place):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequestError(f"{place}.content must be text: the model reads nothing else", param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _list(value: object, place: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise BadRequestError(f"{place} is not as OpenAI's API has it, got {shorten(value)}", param="messages")


def _call(value: Any, place: str) -> Message:  # noqa: ANN401 - JSON
    """As templates read it: arguments are an object where they are one."""
    match value:
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            identity = value.get("id")
            function = {"name": name, "arguments": parsed(arguments, otherwise=arguments)}
            return {"id": identity if isinstance(identity, str) else "", "type": "function", "function": function}
    raise BadRequestError(f"{place}.tool_calls must have a function with name and arguments as texts", param="messages")


# ---- a session


class Transcript:
    """The requests and answers of one session."""

    def __init__(
        self, template: MessageTemplate, *, stops: Sequence[str] = (), calls_in_thoughts: bool = False
    ) -> None:
        """Begin without requests.

        Args:
            template: how messages become text.
            stops: strings that end a turn. The model has written them, its text is without them.
            calls_in_thoughts: tool calls within `<think>…</think>` are calls, too.
        """
        self._template = template
        self._calls_in_thoughts = calls_in_thoughts
        self._thinking = False
        """Whether the newest text that was read ends within a thought, as some templates begin a turn."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._kind = ""
        self._tools = b""
        self._messages: list[bytes] = []
        """Digests of all messages, answers included; of a text completion that of the whole text."""
        self._chars = 0
        """Of the text of a text completion."""
        self._cut = False
        """Whether the newest turn was: behind it stands no stop string of the model's."""
        self._ask: Ask | None = None
        self.answers = 0

    def reading(self, ask: Ask, *, branches: bool) -> Reading:
        """What the model reads for a request. Takes nothing of it for the history.

        At first that is the prompt. Later it stands behind what was read and written, and begins with the end of the model's turn,
        if a template writes one; where a request continues nothing it is the prompt of a new context, if there may be `branches`.

        Raises:
            EditedError: it does not continue what has been.
            BadRequestError: the template refuses it.
            ToolsRefusedError: the template leaves its tools out, or has calls in a layout that is not known.
        """
        try:
            reading = self._reading(ask, branches=branches)
        except UserError as error:
            raise BadRequestError(str(error), param="messages") from None
        self._thinking = reading.text.rstrip().endswith(_THINK)
        return reading

    def _reading(self, ask: Ask, *, branches: bool) -> Reading:
        if not self._kind:
            return Reading(text=self._whole(ask))
        try:
            return Reading(text=self._added(ask))
        except EditedError:
            if not branches:
                raise
            return Reading(text=self._whole(ask), context=True)

    def _whole(self, ask: Ask) -> str:
        if ask.kind == "text":
            return ask.prompt
        text = self._template.conversation(ask.messages, tools=ask.tools)
        if ask.tools:
            self._check_tools(ask, text)
        return text

    def _check_tools(self, ask: Ask, text: str) -> None:
        with contextlib.suppress(UserError):  # a template that needs tools does not ignore them
            if text == self._template.conversation(ask.messages):
                raise ToolsRefusedError(_TOOLS_IGNORED)
        try:
            _ = self._template.layout
        except UserError as error:
            raise ToolsRefusedError(error) from None

    def _added(self, ask: Ask) -> str:
        if ask.kind != self._kind:
            raise EditedError("it went from chat completions to text completions, or back")
        if ask.kind == "text":
            return self._behind(ask.prompt)
        if _digest(ask.tools) != self._tools:
            raise EditedError("its tools are others than before; they stand at the beginning of the conversation")
        known = len(self._messages)
        for place, (digest, message) in enumerate(zip(self._messages, ask.messages, strict=False)):
            if digest != _identity(message):
                raise EditedError(f"messages[{place}] is another than before: {shorten(message)}")
        if len(ask.messages) < known:
            raise EditedError(f"it has {len(ask.messages)} messages, and there have been {known}")
        calls = ask.messages[known - 1].get("tool_calls", ())
        return self._template.continuation(ask.messages[known:], tools=ask.tools, calls=calls)

    def _behind(self, prompt: str) -> str:
        if _digest(prompt[: self._chars]) != self._messages[0]:
            raise EditedError("its prompt does not begin with the one before and its answer")
        rest = prompt[self._chars :]
        if self._cut:
            return rest
        return rest.removeprefix(next((stop for stop in self._stops if rest.startswith(stop)), ""))

    def accept(self, ask: Ask) -> None:
        """The request whose text the model is to read."""
        self._ask, self._kind, self._tools = ask, ask.kind, _digest(ask.tools)

    def answer(self, turn: Turn) -> Answer:
        """The model's turn, as the answer to the accepted request."""
        assert self._ask is not None
        ask, self._ask = self._ask, None
        self.answers += 1
        self._cut = turn.finish_reason == "length"
        if ask.kind == "text":
            self._chars = len(ask.prompt) + len(turn.text)
            self._messages = [_digest(ask.prompt + turn.text)]
            return Answer(turn=turn, number=self.answers, content=turn.text)
        parts = self._parts(turn.text, ask.tools) if ask.tools else read_channels(turn.text)
        calls = tuple(
            ToolCall(id=_call_id(self.answers, place), name=name, arguments=json.dumps(arguments, ensure_ascii=False))
            for place, (name, arguments) in enumerate(parts.calls)
        )
        said = {"role": "assistant", "content": parts.content, "tool_calls": [call_json(call) for call in calls]}
        self._messages = [_identity(message) for message in (*ask.messages, _message(said, "the answer"))]
        return Answer(
            turn=turn, number=self.answers, content=parts.content, reasoning=parts.reasoning, tool_calls=calls
        )

    def _parts(self, text: str, tools: Sequence[Message]) -> TurnParts:
        begun = _THINK if self._thinking else ""
        parts = self._template.layout.read(begun + text, tools=tools, in_thoughts=self._calls_in_thoughts)
        return replace(parts, content=parts.content.removeprefix(begun))


def _call_id(turn: int, place: int) -> str:
    """Return a call's id: nine letters and digits, as Mistral's templates want it."""
    return f"c{turn:04}{place:04}"


def _identity(message: Message) -> bytes:
    """The same for messages that say the same."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return _digest([message["role"], message["content"], calls, message.get("tool_call_id"), message.get("name")])


def _digest(value: object) -> bytes:
    text = json.dumps(_by_value(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _by_value(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a form that is equal for JSON of equal value: `1.0` is `1`, and `1e23` is that integer, not the double next to it."""
    match value:
        case float() if value.is_integer():
            return int(Decimal(repr(value)))
        case dict():
            return {name: _by_value(item) for name, item in value.items()}
        case list() | tuple():
            return [_by_value(item) for item in value]
    return value


def call_json(call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's API writes it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
