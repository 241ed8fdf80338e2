"""OpenAI's Responses API, said as the chat that it means. Pure.

    instructions                                    a system message before all others
    message, or a text                              a message
    function_call, behind a message or alone        a call of the assistant's message that it belongs to: the one before it, but of no
                                                    other turn, as ids tell that we gave
    function_call_output                            a message of the tool
    reasoning                                       nothing: the model's text is its message

Owns the shapes of this API alone: what a chat is, and which one continues another, is `transcript.py`'s. Nothing is stored, so a
request has the whole conversation.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamrl.errors import shorten
from streamrl_workers.agents.transcript import Answer, Ask, BadRequestError, chat_ask, json_object

_WHOLE = "nothing is stored: send the whole conversation as input"
_REFUSED = {"previous_response_id": _WHOLE, "conversation": _WHOLE, "prompt": _WHOLE, "background": "ask and wait"}
_TEXTS = ("input_text", "output_text", "text")
_OWN_ID = re.compile(r"msg_(\d+)|c(\d{4})\d{4,}")
"""Of a message or a call; with its turn."""

Item = dict[str, Any]


def parse_response(body: bytes) -> Ask:
    """A request for the model's next response. Raises `BadRequestError`."""
    value = json_object(body)
    for name, instead in _REFUSED.items():
        if value.get(name):
            raise BadRequestError(f"{name} is not supported: {instead}", param=name)
    messages = _messages(value.get("input"))
    match value.get("instructions"):
        case None | "":
            pass
        case str(instructions):
            messages.insert(0, {"role": "system", "content": instructions})
        case other:
            raise BadRequestError(f"instructions must be a text, got {shorten(other)}", param="instructions")
    tools = value.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequestError(f"tools must be a list, got {shorten(tools)}", param="tools")
    kept = {name: value[name] for name in ("model", "stream") if name in value}
    return chat_ask(kept | {"messages": messages, "tools": [_tool(tool, place) for place, tool in enumerate(tools)]})


def _tool(value: object, place: int) -> Item:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise BadRequestError(f"tools[{place}] must be a function: the program runs all tools itself", param="tools")
    function = {name: field for name, field in value.items() if name != "type" and field is not None}
    return {"type": "function", "function": function}


def _messages(value: object) -> list[Item]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRequestError("input must be a text or a list of at least one item", param="input")
    messages: list[Item] = []
    for place, item in enumerate(value):
        _add(messages, item, f"input[{place}]")
    return messages


def _add(messages: list[Item], item: object, place: str) -> None:
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            if not messages or not _belongs(call_id, messages[-1]):
                messages.append({"role": "assistant", "content": "", "id": call_id})
            function = {"name": name, "arguments": arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": call_id, "function": function})
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(output, place)})
        case {"type": "reasoning"}:
            pass
        case {"role": str(role), "content": content, **rest} if rest.get("type", "message") == "message":
            messages.append({"role": role, "content": _content(content, place), "id": rest.get("id")})
        case _:
            kinds = "a message, function_call, function_call_output or reasoning"
            raise BadRequestError(f"{place} must be {kinds}, got {shorten(item)}", param="input")


def _belongs(call_id: str, message: Item) -> bool:
    """Whether a call is the message's."""
    found = [_OWN_ID.fullmatch(str(given)) for given in (call_id, message.get("id"))]
    turns = {int(own[1] or own[2]) for own in found if own}
    return message["role"] == "assistant" and len(turns) < len(found)


def _content(value: object, place: str) -> object:
    """As a chat has it."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS:
            raise BadRequestError(f"{place} must be text: the model reads nothing else", param="input")
    return [{"type": "text", "text": part.get("text")} for part in value]


# ---- the answer


def response_json(ask: Ask, answer: Answer) -> Item:
    """The model's turn as a response."""
    cut = answer.turn.finish_reason == "length"
    before, own = answer.turn.context_tokens, answer.turn.tokens
    return _head(ask, answer) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer),
        "usage": {
            "input_tokens": before,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": own,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": before + own,
        },
    }


def _head(ask: Ask, answer: Answer) -> Item:
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": ask.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool.get("function", {})} for tool in ask.tools],
        "top_p": None,
        "usage": None,
    }


def _output(answer: Answer) -> list[Item]:
    status = "incomplete" if answer.turn.finish_reason == "length" else "completed"
    items: list[Item] = []
    if answer.content or not answer.tool_calls:
        head = {"type": "message", "id": f"msg_{answer.number}", "role": "assistant", "status": status}
        items.append(head | {"content": [_text(answer.content)]})
    for call in answer.tool_calls:
        head = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": status}
        items.append(head | {"name": call.name, "arguments": call.arguments})
    return items


def _text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_events(ask: Ask, answer: Answer) -> Sequence[Item]:
    """The same as events of a stream, in one piece."""
    begun, whole = _head(ask, answer), response_json(ask, answer)
    events: list[Item] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for place, item in enumerate(whole["output"]):
        empty: Item = {"content": []} if item["type"] == "message" else {"arguments": ""}
        frame = {"output_index": place}
        added = item | empty | {"status": "in_progress"}
        events.append({"type": "response.output_item.added", **frame, "item": added})
        events += [event | frame | {"item_id": item["id"]} for event in _inside(item)]
        events.append({"type": "response.output_item.done", **frame, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def _inside(item: Mapping[str, Any]) -> Iterator[Item]:
    """What comes between an item's beginning and its end."""
    if item["type"] == "function_call":
        kind, written = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", "delta": written}
        yield {"type": f"{kind}.done", "arguments": written, "name": item["name"]}
        return
    (part,) = item["content"]
    place, text = {"content_index": 0}, part["text"]
    yield {"type": "response.content_part.added", **place, "part": _text("")}
    yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def event_lines(events: Sequence[Item]) -> str:
    """As they are sent."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
