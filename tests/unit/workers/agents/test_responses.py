"""A request of the Responses API is the chat that it means: tables, and the property that an answer sent back is continued."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.spec.task import Chat
from streamrl_workers.agents.responses import event_lines, parse_response, response_events, response_json
from streamrl_workers.agents.transcript import BadRequestError, Transcript, Turn, parse_chat
from streamrl_workers.tasks.chat import ChatTemplate
from support.chat_models import END, TOOL_TEMPLATE, chat_tokenizer

FUNCTION = {"name": "add", "parameters": {"type": "object"}, "strict": True}
CHATML = ChatTemplate(chat_tokenizer(template=TOOL_TEMPLATE), chat=Chat(), ends={2: END})
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"of": [1]}'}
CALLED = {"id": "c1", "function": {"name": "add", "arguments": '{"of": [1]}'}}


def request(given: Any, **fields: Any) -> bytes:
    return json.dumps({"input": given, **fields}).encode()


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (request("hello"), [user("hello")]),
        (request("hello", instructions="be kind"), [{"role": "system", "content": "be kind"}, user("hello")]),
        (request([{"type": "message", **user([{"type": "input_text", "text": "a"}])}]), [user("a")]),
        (request([user("a"), {"type": "reasoning", "id": "rs", "summary": []}, user("b")]), [user("a"), user("b")]),
        (
            request([user("a"), CALL, CALL | {"call_id": "c2"}]),
            [user("a"), assistant("", CALLED, CALLED | {"id": "c2"})],
        ),
        (request([assistant("I add."), CALL]), [assistant("I add.", CALLED)]),
        (request([assistant("I add.") | {"id": "msg_2"}, CALL]), [assistant("I add.", CALLED)]),
        (
            request([assistant("I add.") | {"id": "msg_1"}, CALL | {"call_id": "c00020000"}]),
            [assistant("I add."), assistant("", CALLED | {"id": "c00020000"})],
        ),
        (
            request([CALL, {"type": "function_call_output", "call_id": "c1", "output": "1"}]),
            [assistant("", CALLED), {"role": "tool", "tool_call_id": "c1", "content": "1"}],
        ),
    ],
)
def test_a_request_is_a_chat(body: bytes, messages: list[Any]) -> None:
    assert parse_response(body).digest == parse_chat(json.dumps({"messages": messages}).encode()).digest


def test_tools_are_functions() -> None:
    chat = {"messages": [user("a")], "tools": [{"type": "function", "function": FUNCTION}]}
    flat = {"type": "function", **FUNCTION, "description": None}
    assert parse_response(request("a", tools=[flat])).digest == parse_chat(json.dumps(chat).encode()).digest
    assert parse_response(request("a", tools=[flat], tool_choice="none")).tools == (chat["tools"][0],)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{}", "input must be a text or a list"),
        (request([]), "at least one item"),
        (request([7]), "input[0] must be a message, function_call, function_call_output or reasoning, got 7"),
        (request([user("a"), {"type": "item_reference", "id": "x"}]), "input[1] must be a message"),
        (request([CALL | {"arguments": {}}]), "input[0] must be"),
        (request([user([{"type": "input_image"}])]), "input[0] must be text"),
        (request([user([{"type": "input_text"}])]), "messages[0].content must be text"),
        (request([{"role": "god", "content": ""}]), "messages[0] must be an object with a role"),
        (request("a", previous_response_id="resp_1"), "previous_response_id is not supported: nothing is stored"),
        (request("a", conversation={"id": "c"}), "conversation is not supported"),
        (request("a", background=True), "background is not supported"),
        (request("a", instructions=[1]), "instructions must be a text"),
        (request("a", tools=[{"type": "web_search"}]), "tools[0] must be a function"),
        (request("a", tools="add"), "tools must be a list"),
    ],
)
def test_what_is_not_understood_is_one_line(body: bytes, text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_response(body)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


SAID_CALL = '<tool_call>{"name": "add", "arguments": {"of": [1]}}</tool_call>'
PIECES = st.sampled_from(["", "x", " ", "I add. ", "é", SAID_CALL, "<tool_call>"])
TEXTS = st.lists(PIECES, max_size=4).map("".join)


@example([("I add.", None), (SAID_CALL, None), (SAID_CALL, None), ("x", "")], True, False)
@given(st.lists(st.tuples(TEXTS, st.none() | TEXTS), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_an_answer_sent_back_is_continued(turns: list[tuple[str, str | None]], tools: bool, streamed: bool) -> None:
    """Whether it came whole or as the last event of a stream, and where nothing stands behind it."""
    transcript = Transcript(CHATML)
    items: list[Any] = [user("add")]
    fields = {"instructions": "play", "tools": [{"type": "function", **FUNCTION}] if tools else []}
    for number, (said, heard) in enumerate(turns):
        ask = parse_response(request(items, **fields))
        added = transcript.reading(ask, branches=False)
        assert number == 0 or added.text.startswith(END)
        transcript.accept(ask)
        answer = transcript.answer(Turn(text=said))
        whole = response_json(ask, answer)
        events = response_events(ask, answer)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert event_lines(events).count("event: ") == len(events)
        assert events[-1]["response"]["output"] == whole["output"]
        items += events[-1]["response"]["output"] if streamed else whole["output"]
        if heard is None:
            continue
        calls = [item["call_id"] for item in whole["output"] if item["type"] == "function_call"]
        items += [{"type": "function_call_output", "call_id": call, "output": heard} for call in calls] or [user(heard)]


def test_a_turn_that_was_cut_is_incomplete() -> None:
    transcript, ask = Transcript(CHATML), parse_response(request("a", stream=True))
    transcript.accept(ask)
    answer = transcript.answer(Turn(text="b", finish_reason="length", context_tokens=3, tokens=2))
    whole = response_json(ask, answer)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (whole["usage"]["input_tokens"], whole["usage"]["total_tokens"]) == (3, 5)
    assert response_events(ask, answer)[-1]["type"] == "response.incomplete"
