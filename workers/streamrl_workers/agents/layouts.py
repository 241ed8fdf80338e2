"""How models write tool calls and thoughts in their turns, layout by layout. Pure.

    hermes      <tool_call>{"name": …, "arguments": {…}}</tool_call>                          Qwen2 and 3, Hermes, SmolLM3, Granite 4
    qwen_xml    <tool_call><function=…><parameter=…>…</parameter></function></tool_call>      Qwen3.5, Qwen3-Coder
    glm_xml     <tool_call>…<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>          GLM 4.5
    mistral     [TOOL_CALLS][{"name": …, "arguments": {…}}], [TOOL_CALLS]…[ARGS]{…}           Mistral
    deepseek    the same between tokens of its own                                            DeepSeek V3 and V3.1
    list        <|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|>                    Granite 3, Phi-4-mini
    lfm2        <|tool_call_start|>[add(a=1)]<|tool_call_end|>                                LFM2
    olmo        <function_calls>add(a=1)</function_calls>                                     OLMo 3
    harmony     <|channel|>commentary to=functions.… <|constrain|>json<|message|>{…}          GPT-OSS
    llama       {"name": …, "parameters": {…}}, as the whole turn                             Llama 3
    pythonic    [add(a=1)], as the whole turn                                                 Llama 4
    glm         the name, and {…} on the next line, as the whole turn                         GLM 4

Owns what is a call in a text. Does not own which layout a chat template has (`tasks/chat.py`), nor which tokens stay in texts
(`answer_marks.py`). The parsers of transformers know three of these layouts, and raise at a call that they cannot read.

Invariants:
- If one call of a turn cannot be read, the turn has none, and its text is as it was. A call in a thought is text, unless asked.
- Reading takes time in proportion to the text, whatever the model writes: no pattern looks for the same end twice.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from streamrl_workers.agents.json_values import check_text, parsed

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""
Tools = Sequence[Mapping[str, Any]]
"""As OpenAI's API describes them."""
BodyReader = Callable[[str, Tools], list[Call]]
"""Reads what stands between the marks of a call. Raises `ValueError` if that is no call."""

_THOUGHT = r"<think>.*?(?:</think>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)"
_TURN = r"(?:\A|(?<=</think>)|(?<=\[/THINK\]))\s*"
"""The beginning of a turn that is calls alone, after its thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParts:
    """A turn, read."""

    content: str
    reasoning: str = ""
    """Of a turn in channels; other layouts leave thoughts in the content."""
    calls: tuple[Call, ...] = ()


class Reader(Protocol):
    """Reads a turn."""

    def __call__(self, text: str, *, tools: Tools, in_thoughts: bool) -> TurnParts:
        """`tools`: of the request. `in_thoughts`: calls in thoughts are calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to write calls."""

    read: Reader
    mark: str = ""
    """A token that only tokenizers of this layout have."""


def _between(begin: str, end: str) -> str:
    """Return the pattern of calls between two marks. A mark without an end takes the rest: no later one has an end either."""
    return rf"{begin}(?:(?P<calls>.*?){end}|.*)"


def _marked(pattern: str, read_body: BodyReader) -> Reader:
    """Read calls where a regular expression finds them, in its group `calls`."""
    calls_alone, either = (re.compile(one, re.DOTALL) for one in (pattern, f"{pattern}|{_THOUGHT}"))

    def read(text: str, *, tools: Tools, in_thoughts: bool) -> TurnParts:
        calls: list[Call] = []
        rest, end = [], 0
        for found in (calls_alone if in_thoughts else either).finditer(text):
            if found["calls"] is None:
                continue
            try:
                calls += _checked(read_body(found["calls"], tools))
            except _UNREADABLE:
                return TurnParts(content=text)
            rest.append(text[end : found.start()])
            end = found.end()
        if not calls:
            return TurnParts(content=text)
        return TurnParts(content="".join([*rest, text[end:]]).strip(), calls=tuple(calls))

    return read


def _whole(opening: str, closing: str, read_body: BodyReader, *, marks: tuple[str, str] = ("", "")) -> Reader:
    """Read calls that are a whole turn, from `opening` to `closing`. `marks`: that may stand around them."""
    before, after = (f"(?:{mark})?" if mark else "" for mark in marks)
    end = rf"{after}\s*\Z"
    marked = _marked(rf"{_TURN}{before}(?P<calls>{opening}.*{closing}){end}", read_body)
    ended = re.compile(closing + end)

    def read(text: str, *, tools: Tools, in_thoughts: bool) -> TurnParts:
        return marked(text, tools=tools, in_thoughts=in_thoughts) if ended.search(text) else TurnParts(content=text)

    return read


def _consecutive(pattern: "re.Pattern[str]", text: str) -> "list[re.Match[str]] | None":
    """Return the matches of which a text consists; None: it has more than these and space."""
    matches, end = [], 0
    while match := pattern.match(text, end):
        matches.append(match)
        end = match.end()
    return None if text[end:].strip() else matches


_UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
"""What JSON and Python's grammar raise at texts that they cannot read."""


def _checked(calls: list[Call]) -> list[Call]:
    if not calls:
        raise ValueError("no call")
    check_text([list(call) for call in calls], allow_nan=False)
    return calls


# ---- JSON


def _json_calls(*keys: str) -> BodyReader:
    """Read an object with a name and arguments by one of these keys, or a list of them."""

    def read(body: str, tools: Tools) -> list[Call]:
        del tools
        value = parsed(body, otherwise=None)
        return [_json_call(one, keys) for one in (value if isinstance(value, list) else [value])]

    return read


def _json_call(value: object, keys: Iterable[str]) -> Call:
    match value:
        case {"name": str(name), **rest}:
            for key in keys:
                if isinstance(arguments := rest.get(key), dict):
                    return name, arguments
    raise ValueError("no call")


def _named_json(name: str, arguments: str) -> Call:
    value = parsed(arguments, otherwise=None)
    if not name.strip() or not isinstance(value, dict):
        raise ValueError("no call")
    return name.strip(), value


def _mistral(body: str, tools: Tools) -> list[Call]:
    name, separator, arguments = body.partition("[ARGS]")
    if not separator:
        return _json_calls("arguments")(body, tools)
    return [_named_json(name.partition("[CALL_ID]")[0], arguments)]


_DEEPSEEK_CALL = re.compile(_between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), re.DOTALL)
_DEEPSEEK_BLOCK = re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n]*)\n```json\n(?P<arguments>.*)\n```\s*", re.DOTALL)


def _deepseek(body: str, tools: Tools) -> list[Call]:
    del tools
    calls = []
    for one in _DEEPSEEK_CALL.findall(body):
        block = _DEEPSEEK_BLOCK.fullmatch(one)
        name, _, arguments = one.partition("<｜tool▁sep｜>")
        calls.append(_named_json(block["name"], block["arguments"]) if block else _named_json(name, arguments))
    return calls


def _glm(body: str, tools: Tools) -> list[Call]:
    del tools
    name, _, arguments = body.partition("\n")
    return [_named_json(name, arguments)]


# ---- tags

_QWEN_CALL = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<pairs>.*)</function>\s*", re.DOTALL)
_QWEN_PAIR = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)
_GLM_CALL = re.compile(r"\s*(?P<name>[^<\s]+)\s*(?P<pairs>.*)", re.DOTALL)
_GLM_PAIR = re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)


def _tagged(call: "re.Pattern[str]", pair: "re.Pattern[str]") -> BodyReader:
    """Read a name and pairs of texts; types are those of the tool's schema."""

    def read(body: str, tools: Tools) -> list[Call]:
        found = call.fullmatch(body)
        pairs = None if found is None else _consecutive(pair, found["pairs"])
        if found is None or pairs is None:
            raise ValueError("no call")
        types = _types(found["name"], tools)
        return [(found["name"], {one["key"]: _typed(one["value"], types.get(one["key"], "string")) for one in pairs})]

    return read


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """Return the types of a tool's parameters, as JSON Schema has them."""
    for tool in tools:
        match tool:
            case {"function": {"name": str(own), "parameters": {"properties": dict(properties)}}} if own == name:
                return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}


def _typed(text: str, kind: object) -> Any:  # noqa: ANN401 - JSON
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    return _CONSTANTS[text] if text in _CONSTANTS else parsed(text, otherwise=text)


# ---- Python

_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def _python_calls(body: str, tools: Tools) -> list[Call]:
    """Read `[add(a=1), add(a=2)]`, or a call in each line."""
    del tools
    calls = []
    for statement in ast.parse(body.strip()).body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        calls += [_python_call(one) for one in (value.elts if isinstance(value, ast.List) else [value])]
    return calls


def _python_call(node: ast.AST | None) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("no call")
    arguments = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("no call")
    return ast.unparse(node.func), {str(key): value for key, value in arguments.items()}


def _literal(node: ast.AST) -> Any:  # noqa: ANN401 - JSON
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.AST | None) -> str:
    match node:
        case ast.Constant(value=str(key)):
            return key
    raise ValueError("a key must be a text")


# ---- channels

_MESSAGE = re.compile(
    r"\s*+(?:<\|start\|>assistant)?(?P<head>[^<]*)<\|channel\|>(?P<channel>\w++)(?P<more>[^<]*(?:<\|constrain\|>[^<]*)?)"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?P<name>[^\s<]+)")


def _harmony(text: str, *, tools: Tools, in_thoughts: bool) -> TurnParts:
    """Read messages in channels: thoughts in `analysis`, calls in `commentary`, the answer in `final`."""
    del tools, in_thoughts
    parts = read_channels(text)
    try:
        calls = [_named_json(name.removeprefix("functions."), body) for name, body in _addressed(text)]
        return replace(parts, calls=tuple(_checked(calls))) if calls else parts
    except _UNREADABLE:
        return TurnParts(content=text)


def _addressed(text: str) -> Iterator[tuple[str, str]]:
    """Yield the messages that go to a tool."""
    for message in _consecutive(_MESSAGE, text) or ():
        if message["channel"] == "commentary" and (to := _recipient(message)):
            yield to["name"], message["body"]


def _recipient(message: "re.Match[str]") -> "re.Match[str] | None":
    return _RECIPIENT.search(message["head"] + message["more"])


def read_channels(text: str) -> TurnParts:
    """Return what a turn in channels says and thinks; another turn is its text. Messages to tools are neither."""
    messages = _consecutive(_MESSAGE, text)
    if not messages:
        return TurnParts(content=text)
    said: dict[bool, list[str]] = {False: [], True: []}
    for message in messages:
        if not _recipient(message):
            said[message["channel"] == "analysis"].append(message["body"])
    return TurnParts(content="\n".join(said[False]), reasoning="\n".join(said[True]))


_TOOL_CALL = _between("<tool_call>", "</tool_call>")

LAYOUTS: Mapping[str, Layout] = {
    "hermes": Layout(read=_marked(_TOOL_CALL, _json_calls("arguments"))),
    "qwen_xml": Layout(read=_marked(_TOOL_CALL, _tagged(_QWEN_CALL, _QWEN_PAIR))),
    "glm_xml": Layout(read=_marked(_TOOL_CALL, _tagged(_GLM_CALL, _GLM_PAIR)), mark="<arg_key>"),
    "mistral": Layout(
        read=_marked(r"\[TOOL_CALLS\](?P<calls>.*?)(?=\[TOOL_CALLS\]|\Z)", _mistral), mark="[TOOL_CALLS]"
    ),
    "deepseek": Layout(
        read=_marked(_between("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), _deepseek),
        mark="<｜tool▁calls▁begin｜>",
    ),
    "list": Layout(
        read=_marked(r"<\|tool_call\|>(?P<calls>.*?)(?:<\|/tool_call\|>|\Z)", _json_calls("arguments")),
        mark="<|tool_call|>",
    ),
    "lfm2": Layout(
        read=_marked(_between(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"), _python_calls),
        mark="<|tool_call_start|>",
    ),
    "olmo": Layout(read=_marked(_between("<function_calls>", "</function_calls>"), _python_calls)),
    "harmony": Layout(read=_harmony, mark="<|channel|>"),
    "llama": Layout(
        read=_whole(r"\{", r"\}", _json_calls("parameters", "arguments"), marks=(r"<\|python_tag\|>", "")),
        mark="<|python_tag|>",
    ),
    "pythonic": Layout(
        read=_whole(r"\[", r"\]", _python_calls, marks=(r"<\|python_start\|>", r"<\|python_end\|>")),
        mark="<|python_start|>",
    ),
    "glm": Layout(read=_whole(r"[^\s<{\[]+\n\{", r"\}", _glm)),
}
"""By name, in the order in which a template's own calls are tried."""

# ---- which layout a template has

PROBE_CALL: Call = ("streamrl_probe", {"text": "streamrl value", "number": 7})
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_CALL[0],
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "number": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "number"],
        },
    },
}


def layout_of(said: str) -> Layout | None:
    """Return the layout that reads the probe's call, and no other, in what a template writes as a turn."""
    found = (
        layout
        for layout in LAYOUTS.values()
        if layout.read(said, tools=[PROBE_TOOL], in_thoughts=False).calls == (PROBE_CALL,)
    )
    return next(found, None)


def marked_layout(tokens: Iterable[str]) -> Layout:
    """Return the layout whose mark is among a tokenizer's tokens; else that of Hermes."""
    known = set(tokens)
    return next((layout for layout in LAYOUTS.values() if layout.mark in known), LAYOUTS["hermes"])


def probe_message(*, as_text: bool) -> dict[str, Any]:
    """Return a turn that calls; some templates read its arguments as an object, others as a text."""
    name, arguments = PROBE_CALL
    function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": "streamrl0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
