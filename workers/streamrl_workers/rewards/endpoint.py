"""`http`: an endpoint judges. POST of {prompt, completion, answer, metadata} as JSON; it answers {"reward": number}.
With `chat` a model judges: the same becomes the one message of a chat completion, and its answer's text has the number.

Owns the client, the tries and their deadline. Many samples are asked about at once; `concurrency` of them at most, which the
pool holds. Invariants:
- All tries together, waits between them included, end by the reward's `timeoutSeconds`.
- Each try waits for its turn, where there are `requestsPerMinute`; one process asks, so they are the job's. This wait is not
  counted. Its bound is `HttpReward.longest_turn_s`, as the pool has so few samples out.
- Tried again: a refused or broken connection, status 429 and 5xx. Any other status but 2xx, and an answer that is no such
  JSON, is a failure of the sample that names the status.
- An answer is bounded as all are (`streamrl_pages.http_fetch`). To refuse an encoded one is simpler than to decode it within a
  bound and outside of the event loop, in which all other samples wait; and an answer is one number.
- The token goes into the request's header alone: into no error, no log.
"""

import asyncio
import json
import os
import random
import re
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from streamrl.errors import UserError, shorten
from streamrl.proto.literals import unmarked
from streamrl.spec.tasks.rewards import HttpReward, JudgeChat
from streamrl_pages.http_fetch import OversizeError, retry_after_s
from streamrl_workers.rewards.base import Item, RewardContext, make_extract

if TYPE_CHECKING:
    from streamrl_pages.http_client import Session

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
"""An answer is one number; more is somebody else's page."""
TOO_MANY_REQUESTS = 429
_SUCCESSES, _SERVER_ERRORS = range(200, 300), range(500, 600)


class EndpointError(RuntimeError):
    """The endpoint gave no reward; the text says why."""


class _TryAgainError(EndpointError):
    """It may give one later."""

    def __init__(self, text: str, *, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s
        """What the endpoint itself asks for (Retry-After)."""


def create(options: HttpReward, *, context: RewardContext) -> "HttpEndpoint":
    """An endpoint that is asked by request. Raises `UserError`: the address is none, or has a user beside the token, or there is no token."""
    if options.host is None:
        raise UserError(field=f"{context.field}.url", rule="must name a host", got=options.url)
    if options.token_variable is not None and urlsplit(options.url).username is not None:
        rule = "must be an address without user and password where tokenVariable is given"
        raise UserError(field=f"{context.field}.url", rule=rule, fix="keep one of the two")
    chat = None if options.chat is None else _Chat(options.chat, field=f"{context.field}.chat")
    return HttpEndpoint(options, token=_token(options, field=context.field), timeout_s=context.timeout_s, chat=chat)


def _token(options: HttpReward, *, field: str) -> str | None:
    if options.token_variable is None:
        return None
    token = os.environ.get(options.token_variable, "").strip()
    if not token:
        raise UserError(
            field=f"{field}.tokenVariable",
            rule="must name an environment variable with a value",
            got=options.token_variable,
            fix="export it before the run",
        )
    return token


def _trusted() -> ssl.SSLContext:
    """Read whom we trust; before the processes fork, since it is dear."""
    import certifi

    return ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())


class _Pace:
    """Turns that are so far apart."""

    def __init__(self, per_minute: int | None) -> None:
        self._apart_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next_s = 0.0

    def take(self) -> float:
        """Seconds until the next one, which is the caller's."""
        now_s = asyncio.get_running_loop().time()
        at_s = max(now_s, self._next_s)
        self._next_s = at_s + self._apart_s
        return at_s - now_s


class _Chat:
    """A sample as a chat completion, and the number in what the model answers."""

    def __init__(self, options: JudgeChat, *, field: str) -> None:
        self._options = options
        self._extract = make_extract(options.pattern, field=f"{field}.pattern")

    def body(self, sample: str) -> str:
        """The request; greedy, so that the same sample is judged alike."""
        told = {
            name: "" if value is None else str(value) for name, value in json.loads(sample).items()
        }  # no reference: nothing
        text = re.sub(r"\{(prompt|completion|answer)\}", lambda found: told[found[1]], self._options.prompt)
        messages = [{"role": "user", "content": text}]
        return json.dumps({"model": self._options.model, "messages": messages, "temperature": 0})

    def number(self, value: Any) -> float:  # noqa: ANN401 - JSON
        """Raises `EndpointError`: there is none."""
        try:
            text = value["choices"][0]["message"]["content"]
            return float(self._extract(text) or "")
        except (LookupError, TypeError, ValueError):
            raise EndpointError(f"the judge's answer must have a number, got {shorten(value)}") from None


class HttpEndpoint:
    """One address."""

    def __init__(self, options: HttpReward, *, token: str | None, timeout_s: float, chat: _Chat | None = None) -> None:
        self._options = options
        self._chat = chat
        self._reward: Callable[[Any], float] = _told_reward if chat is None else chat.number
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._trusted = _trusted()
        self._session: Session | None = None
        self._pace = _Pace(options.requests_per_minute)

    def body(self, completion: str, item: Item) -> str:
        """The sample as JSON, ASCII; every endpoint gets the same."""
        value = {
            "prompt": unmarked(item.prompt),
            "completion": completion,
            "answer": item.answer,
            "metadata": dict(item.metadata),
        }
        return json.dumps(value, allow_nan=False, default=str)

    async def ask(self, body: str) -> object:
        """The endpoint's number. Raises `EndpointError`, or `TimeoutError` if time runs out."""
        try:
            async with asyncio.timeout(None) as limit:
                return await self._ask(body, limit)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, body: str, limit: asyncio.Timeout) -> object:
        if self._chat is not None:
            body = self._chat.body(body)
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        for tries in range(self._options.retries + 1):
            turn_s = self._pace.take()
            deadline_s += turn_s
            limit.reschedule(deadline_s)
            await asyncio.sleep(turn_s)
            try:
                return await self._try(body)
            except _TryAgainError as error:
                if tries == self._options.retries:
                    raise EndpointError(f"{error}, after {tries + 1} tries") from error
                wait_s = max(error.after_s, _wait_s(tries))
                if asyncio.get_running_loop().time() + wait_s >= deadline_s:
                    raise EndpointError(f"{error}; no time is left to try again in {wait_s:.1f} s") from error
                await asyncio.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    async def _try(self, body: str) -> object:
        import aiohttp

        from streamrl_pages.http_client import BoundedResponse, EncodedError, session

        if self._session is None:
            self._session = session(tls=self._trusted, agent="streamrl", connections=self._options.concurrency)
        limit = aiohttp.ClientTimeout(total=None)  # `ask` has one for all tries together
        sent = self._session.post(self._options.url, data=body.encode("ascii"), headers=self._headers, timeout=limit)
        try:
            async with sent as response:
                assert isinstance(response, BoundedResponse), "the session makes no others"
                answer = await response.at_most(MAX_ANSWER_BYTES).read()
                after_s = retry_after_s(response.headers.get("Retry-After")) or 0.0
                return self._reward(_checked(response.status, answer=answer, after_s=after_s))
        except OversizeError as error:
            raise EndpointError(f"status {response.status}: {error}") from None
        except EncodedError as error:
            raise EndpointError(str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _TryAgainError(f"the connection failed: {type(error).__name__}: {shorten(str(error))}") from error


def _checked(status: int, *, answer: bytes, after_s: float) -> Any:  # noqa: ANN401 - JSON
    """What a good answer says."""
    if status == TOO_MANY_REQUESTS or status in _SERVER_ERRORS:
        raise _TryAgainError(f"answered with status {status}", after_s=after_s)
    if status not in _SUCCESSES:
        raise EndpointError(f"answered with status {status}")
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"status {status}: the answer is no JSON: {shorten(answer[:100])}") from error


def _told_reward(value: Any) -> float:  # noqa: ANN401 - JSON
    reward = value.get("reward") if isinstance(value, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise EndpointError(f'the answer must be {{"reward": number}}, got {shorten(value)}')
    return reward


def _wait_s(tries: int) -> float:
    """Twice as long each time, and not in step with the other processes."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**tries) * random.uniform(0.5, 1.0)
