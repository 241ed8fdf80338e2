"""`http`: an endpoint judges. POST of {prompt, completion, answer, metadata} as JSON; it answers {"reward": number}.

Owns the client (each process keeps connections of its own), the tries and their deadline. Invariants:
- All tries together, waits included, end before the reward's `timeoutSeconds`; the pool ends what would not.
- Tried again: a refused or broken connection, status 429 and 5xx. Any other status but 2xx, and an answer that is no such
  JSON, is a failure of the sample that names the status. Redirects are not followed, proxies of the environment not used.
- The token goes into the request's header alone: into no error, no log.
"""

import datetime
import email.utils
import json
import os
import random
import ssl
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from streamrl.errors import UserError, shorten
from streamrl.spec.task import HttpReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer

if TYPE_CHECKING:
    import httpx

BUDGET_SHARE = 0.9
"""Of the reward's time limit: the rest is for telling what went wrong before the pool ends the process."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
"""An answer is one number; more is somebody else's page."""
TOO_MANY_REQUESTS = 429
SERVER_ERRORS = range(500, 600)
GOOD = range(200, 300)


class EndpointError(RuntimeError):
    """The endpoint gave no reward; the text says why."""


class _TryAgainError(EndpointError):
    """It may give one later."""

    def __init__(self, text: str, *, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.after_s = after_s
        """What the endpoint itself asks for (Retry-After)."""


def create(options: HttpReward, *, context: RewardContext) -> Scorer:
    """Scorer by request. Raises `UserError` for an address without a host or a token that is not there."""
    import httpx

    try:
        host = urlsplit(options.url).hostname and httpx.URL(options.url).host
    except (httpx.InvalidURL, ValueError) as error:
        raise UserError(field=f"{context.field}.url", rule=f"must be an address: {error}", got=options.url) from error
    if not host:
        raise UserError(field=f"{context.field}.url", rule="must name a host", got=options.url)
    token = _token(options, field=context.field)
    endpoint = _Endpoint(options, token=token, budget_s=BUDGET_SHARE * context.timeout_s)
    return endpoint.score


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


def _new_client() -> "httpx.Client":
    """Made before the processes fork, which is dear; connections are made by the requests, in each process its own."""
    import certifi
    import httpx

    trusted = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
    return httpx.Client(trust_env=False, follow_redirects=False, verify=trusted)


class _Endpoint:
    """One address."""

    def __init__(
        self,
        options: HttpReward,
        *,
        token: str | None,
        budget_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._budget_s = budget_s
        self._clock = clock
        self._client = _new_client()
        weakref.finalize(self, self._client.close)

    def score(self, completion: str, item: Item) -> object:
        """The endpoint's number. Raises `EndpointError`, or `TimeoutError` if time runs out."""
        deadline = self._clock() + self._budget_s
        body = _body(completion, item)
        for tries in range(self._options.retries + 1):
            try:
                return self._try(body, deadline=deadline)
            except _TryAgainError as error:
                if tries == self._options.retries:
                    raise EndpointError(f"{error}, after {tries + 1} tries") from error
                wait_s = max(error.after_s, _wait_s(tries))
                if self._clock() + wait_s >= deadline:
                    raise EndpointError(f"{error}; no time is left to try again in {wait_s:.1f} s") from error
                time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _try(self, body: bytes, *, deadline: float) -> object:
        import httpx

        left_s = max(0.001, deadline - self._clock())
        request = {"content": body, "headers": self._headers, "timeout": left_s}
        try:
            with self._client.stream("POST", self._options.url, **request) as response:  # type: ignore[arg-type] # a dict of several types
                return _reward(response, answer=self._read(response, deadline=deadline))
        except httpx.TimeoutException as error:
            raise self._late() from error
        except httpx.TransportError as error:
            raise _TryAgainError(f"the connection failed: {type(error).__name__}: {shorten(str(error))}") from error
        except httpx.DecodingError as error:
            raise EndpointError(f"the answer's encoding is broken: {shorten(str(error))}") from error

    def _read(self, response: "httpx.Response", *, deadline: float) -> bytes:
        parts = bytearray()
        for part in response.iter_bytes():
            if parts and self._clock() > deadline:
                raise self._late()
            parts += part
            if len(parts) > MAX_ANSWER_BYTES:
                raise EndpointError(f"status {response.status_code}: the answer has over {MAX_ANSWER_BYTES} bytes")
        return bytes(parts)

    def _late(self) -> TimeoutError:
        return TimeoutError(f"no answer within {self._budget_s:g} s")


def _body(completion: str, item: Item) -> bytes:
    value = {
        "prompt": item.prompt,
        "completion": completion,
        "answer": item.answer,
        "metadata": dict(item.metadata),
    }
    return json.dumps(value, allow_nan=False, default=str).encode("ascii")


def _reward(response: "httpx.Response", *, answer: bytes) -> object:
    status = response.status_code
    if status == TOO_MANY_REQUESTS or status in SERVER_ERRORS:
        raise _TryAgainError(
            f"answered with status {status}", after_s=_retry_after_s(response.headers.get("retry-after"))
        )
    if status not in GOOD:
        raise EndpointError(f"answered with status {status}")
    try:
        value: Any = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"status {status}: the answer is no JSON: {shorten(answer[:100])}") from error
    reward = value.get("reward") if isinstance(value, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise EndpointError(f'status {status}: the answer must be {{"reward": number}}, got {shorten(value)}')
    return reward


def _wait_s(tries: int) -> float:
    """Twice as long each time, and not in step with the other processes."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**tries) * random.uniform(0.5, 1.0)


def _retry_after_s(text: str | None) -> float:
    """Seconds, or a date (RFC 9110, 10.2.3); 0 for anything else."""
    if text is None:
        return 0.0
    if text.strip().isdigit():
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())
