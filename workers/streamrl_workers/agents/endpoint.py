"""OpenAI's API as programs know it: requests in, one answer each, errors in its shape. On the loopback address.

    POST /v1/chat/completions, /v1/completions    the session's next turn; waits until the model has made it
    POST /v1/responses                            the same
    POST /v1/reward {"reward": 0.5}               adds to the reward of the turn
    POST /v1/end {"error": "…"}                   ends the sample; with an error it has failed
    GET  /v1/models                               the one model there is

Owns the shapes. Does not own sessions (`host.py`) nor what a request says (`transcript.py`). The bearer token names the session.
An answer that is asked for as a stream comes as events in one piece.
"""

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from streamrl_pages.calls import TOO_LARGE, HttpCall, Reply, calls
from streamrl_pages.server import PageServer
from streamrl_workers.agents.responses import event_lines, parse_response, response_events, response_json
from streamrl_workers.agents.transcript import (
    Answer,
    Ask,
    BadRequestError,
    call_json,
    parse_chat,
    parse_end,
    parse_reward,
    parse_text,
)

MAX_REQUEST_BYTES = 1 << 20
"""Of a body: a history of some 200,000 tokens."""
REQUEST_S = 60.0
"""For a request to arrive; a program with many threads on a busy machine is slow."""
OPEN_CONNECTIONS = 256
"""That have not said yet what they want, or are not held."""
_RETRY = "x-stainless-retry-count"
"""Header by which OpenAI's clients say that they ask again."""
UNAUTHORIZED = 401


class Answering(Protocol):
    """A session, as far as requests know it."""

    async def ask(self, ask: Ask, *, again: bool) -> Answer:
        """The model's answer; waits for it. `again`: its client may have lost an answer. Raises `BadRequestError`."""

    def earn(self, reward: float) -> None:
        """Add to the reward of the turn."""

    def finish(self, error: str) -> None:
        """The program says that the sample has ended; `error`: why it has failed."""


class Endpoint:
    """Serves sessions. `start` binds, `close` ends."""

    def __init__(self, session_of: Callable[[str], Answering | None]) -> None:
        """`session_of`: by its key."""
        self._session_of = session_of
        routes = {
            ("POST", "/v1/chat/completions"): self._answering(parse_chat, _chat_reply),
            ("POST", "/v1/completions"): self._answering(parse_text, _text_reply),
            ("POST", "/v1/responses"): self._answering(parse_response, _response_reply),
            ("POST", "/v1/reward"): self._checked(self._reward),
            ("POST", "/reward"): self._checked(self._reward),
            ("POST", "/v1/end"): self._checked(self._end),
            ("POST", "/end"): self._checked(self._end),
            ("GET", "/v1/models"): self._checked(self._models),
        }
        app = calls(routes, refused=_refused, most_bytes=MAX_REQUEST_BYTES)
        self._server = PageServer(app, timeout_s=REQUEST_S, of_a_peer=OPEN_CONNECTIONS)

    async def start(self) -> str:
        """The address that programs use as base URL."""
        port = await self._server.start(host="127.0.0.1", port=0)
        return f"http://127.0.0.1:{port}/v1"

    async def close(self) -> None:
        """Break all connections off."""
        await self._server.close()

    def _answering(
        self, parse: Callable[[bytes], Ask], reply: Callable[[Ask, Answer], Reply]
    ) -> Callable[[HttpCall], Awaitable[Reply]]:
        async def handle(call: HttpCall, session: Answering) -> Reply:
            ask = parse(await _body(call))
            call.hold()
            retries = call.headers.get(_RETRY, "0")
            return reply(ask, await session.ask(ask, again=retries not in ("", "0")))

        return self._checked(handle)

    def _checked(
        self, handle: Callable[[HttpCall, Answering], Awaitable[Reply]]
    ) -> Callable[[HttpCall], Awaitable[Reply]]:
        async def checked(call: HttpCall) -> Reply:
            try:
                session = self._session(call.token)
                call.admit()
                return await handle(call, session)
            except BadRequestError as error:
                return _error(str(error), status=error.status, param=error.param, code=error.code)

        return checked

    def _session(self, key: str) -> Answering:
        session = self._session_of(key)
        if session is None:
            text = "the API key must be that of a running session (OPENAI_API_KEY)"
            raise BadRequestError(text, status=UNAUTHORIZED, code="invalid_api_key")
        return session

    async def _reward(self, call: HttpCall, session: Answering) -> Reply:
        session.earn(parse_reward(await _body(call)))
        return _json({})

    async def _end(self, call: HttpCall, session: Answering) -> Reply:
        session.finish(parse_end(await _body(call)))
        return _json({})

    async def _models(self, call: HttpCall, session: Answering) -> Reply:
        del call, session
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "streamrl"}
        return _json({"object": "list", "data": [model]})


async def _body(call: HttpCall) -> bytes:
    body = await call.body()
    if body is None:
        raise BadRequestError(f"a request must have at most {MAX_REQUEST_BYTES} bytes", status=TOO_LARGE)
    return body


# ---- shapes


def _json(value: object, *, status: int = 200) -> Reply:
    return Reply(text=json.dumps(value), status=status)


def _error(text: str, *, status: int, param: str | None = None, code: str | None = None) -> Reply:
    error = {"message": text, "type": "invalid_request_error", "param": param, "code": code}
    return _json({"error": error}, status=status)


def _refused(status: int) -> Reply:
    return _error("there is no such call: see docs/agents.md", status=status)


def _head(ask: Ask, answer: Answer, *, kind: str) -> dict[str, Any]:
    return {"id": f"streamrl-{answer.number}", "object": kind, "created": int(time.time()), "model": ask.model}


def _usage(answer: Answer) -> dict[str, int]:
    before, own = answer.turn.context_tokens, answer.turn.tokens
    return {"prompt_tokens": before, "completion_tokens": own, "total_tokens": before + own}


def _chat_reply(ask: Ask, answer: Answer) -> Reply:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [call_json(call) for call in answer.tool_calls]
    if not ask.stream:
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        return _json(_head(ask, answer, kind="chat.completion") | {"choices": [choice], "usage": _usage(answer)})
    delta = message | (
        {"tool_calls": [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]}
        if answer.tool_calls
        else {}
    )
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": answer.finish_reason},
    ]
    head = _head(ask, answer, kind="chat.completion.chunk")
    chunks = [head | {"choices": [choice]} for choice in choices]
    return _events([*chunks, head | {"choices": [], "usage": _usage(answer)}] if ask.stream_usage else chunks)


def _text_reply(ask: Ask, answer: Answer) -> Reply:
    choice = {"index": 0, "text": answer.content, "finish_reason": answer.finish_reason, "logprobs": None}
    whole = _head(ask, answer, kind="text_completion") | {"choices": [choice], "usage": _usage(answer)}
    return _events([whole]) if ask.stream else _json(whole)


def _response_reply(ask: Ask, answer: Answer) -> Reply:
    if not ask.stream:
        return _json(response_json(ask, answer))
    return _stream(event_lines(response_events(ask, answer)))


def _events(values: Sequence[object]) -> Reply:
    lines = [*(json.dumps(value) for value in values), "[DONE]"]
    return _stream("".join(f"data: {line}\n\n" for line in lines))


def _stream(text: str) -> Reply:
    return Reply(text=text, media_type="text/event-stream")
