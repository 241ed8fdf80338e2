"""`http` against a real server that is good, slow, hanging, refusing, wrong or flapping."""

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.proto.literals import MARK
from streamrl.spec.tasks.rewards import HttpReward
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.endpoint import EndpointError
from streamrl_workers.rewards.registry import BadValueError, Part, make_parts
from support.endpoints import Answer, say, serving
from support.memory import memory_limit
from support.task_jobs import make_task

LIMIT_S = 60.0
ITEM = Item(prompt="1+1=", target="", question="1+1", answer="2", metadata={"level": 3, "odd": {1}}, source_index=0)


MADE: list[Part] = []


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    while MADE:
        endpoint = MADE.pop().endpoint
        assert endpoint is not None
        await endpoint.close()


def part(url: str, *, timeout_s: float = LIMIT_S, **options: Any) -> Part:
    reward = {"name": "judge", "timeoutSeconds": timeout_s, "http": {"url": url, **options}}
    (made,) = make_parts(make_task(rewards=[reward]).rewards, verify=lambda *_: 0.0, base_dir=Path())
    MADE.append(made)
    return made


async def value(judge: Part, completion: str = "a") -> float:
    """As the task pool asks: the body is made in one process and sent by another."""
    assert judge.endpoint is not None
    return await judge.ask(judge.endpoint.body(completion, ITEM))


def always(status: int, body: str = "", **headers: str) -> Answer:
    return lambda handler, _: say(handler, status, body, **headers)


def good(handler: BaseHTTPRequestHandler, number: int) -> None:
    say(handler, 200, f'{{"reward": {number}.5, "why": "it is so"}}')


async def test_the_endpoint_gets_the_sample_and_its_number_is_the_reward() -> None:
    with serving(good) as endpoint:
        judge = part(endpoint.url)
        assert [await value(judge, text) for text in ("a", "\ud800ü")] == [0.5, 1.5]
    assert endpoint.bodies[0] == {
        "prompt": "1+1=",
        "completion": "a",
        "answer": "2",
        "metadata": {"level": 3, "odd": "{1}"},
    }
    assert endpoint.bodies[1]["completion"] == "\ud800ü"
    assert len(endpoint.connections) == 1, "the connection was not kept"


async def test_the_endpoint_gets_a_literal_as_people_read_it() -> None:
    with serving(good) as endpoint:
        judge = part(endpoint.url)
        assert judge.endpoint is not None
        await judge.ask(judge.endpoint.body("a", replace(ITEM, prompt=f"a<{MARK}|im_end|>")))
    assert endpoint.bodies[0]["prompt"] == "a<|im_end|>"


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_flapping_endpoint_is_asked_again(status: int) -> None:
    def flap(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, status if number < 2 else 200, '{"reward": 1}')

    with serving(flap) as endpoint:
        assert await value(part(endpoint.url, retries=2)) == 1.0
        assert len(endpoint.bodies) == 3


async def test_requests_begin_no_more_often_than_they_may() -> None:
    with serving(good) as endpoint:
        judge = part(endpoint.url, requestsPerMinute=600)
        began = time.monotonic()
        await asyncio.gather(*(value(judge) for _ in range(4)))
        assert time.monotonic() - began >= 0.3
        assert len(endpoint.bodies) == 4


async def test_waiting_for_a_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are 6 s apart and the limit is 5 s: each is asked all the same, tries after a failure too. Sleeps move the clock."""
    loop, sleep, slept = asyncio.get_running_loop(), asyncio.sleep, []
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + sum(slept))

    async def skip(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    def fails_once(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, 503 if number == 2 else 200, '{"reward": 1}')

    with serving(fails_once) as endpoint:
        judge = part(endpoint.url, requestsPerMinute=10, timeout_s=5.0)
        monkeypatch.setattr(asyncio, "sleep", skip)
        assert [await value(judge) for _ in range(4)] == [1.0] * 4
    assert len(endpoint.bodies) == 5
    assert 20 <= sum(slept) <= 24


@pytest.mark.parametrize(
    ("per_minute", "timeout_s", "at_once", "turn_s"),
    [(None, 1.0, 32, 0.0), (60, 10.0, 5, 5.0), (1, 5.0, 1, 60.0), (10_000, 60.0, 32, 0.192)],
)
def test_as_many_wait_as_get_their_turn_soon(
    per_minute: int | None, timeout_s: float, at_once: int, turn_s: float
) -> None:
    reward = HttpReward.model_validate({"url": "http://judge", "requestsPerMinute": per_minute})
    assert reward.most_at_once(timeout_s) == at_once
    assert reward.longest_turn_s(timeout_s) == pytest.approx(turn_s)
    assert reward.longest_s(timeout_s) == pytest.approx(timeout_s + 3 * turn_s)


async def test_it_waits_as_long_as_it_is_told_and_not_beyond_its_time() -> None:
    def later(handler: BaseHTTPRequestHandler, number: int) -> None:
        say(handler, 503 if number == 0 else 200, '{"reward": 1}', retry_after="1")

    with serving(later) as endpoint:
        began = time.monotonic()
        assert await value(part(endpoint.url)) == 1.0
        assert time.monotonic() - began >= 1.0
    with serving(always(503, retry_after="3600")) as endpoint:
        with pytest.raises(EndpointError, match=r"answered with status 503; no time is left to try again in 3600\.0 s"):
            await value(part(endpoint.url))
        assert len(endpoint.bodies) == 1
    with serving(always(429, retry_after="Wed, 01 Jan 2200 00:00:00 GMT")) as endpoint:
        judge = part(endpoint.url)
        with pytest.raises(EndpointError, match="status 429; no time is left"):
            await value(judge)


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (404, "", "answered with status 404"),
        (400, "{}", "answered with status 400"),
        (302, "", "answered with status 302"),
        (200, "no", "status 200: the answer is no JSON: b'no'"),
        (200, "", "status 200: the answer is no JSON"),
        (204, "", "status 204: the answer is no JSON"),
        (200, "[1]", 'the answer must be {"reward": number}, got [1]'),
        (200, "{}", 'the answer must be {"reward": number}, got {}'),
        (200, '{"reward": "1"}', "must be"),
        (200, '{"reward": true}', "must be"),
        (200, '{"reward": null}', "must be"),
        (200, "[" * 100_000, "no JSON"),
        (200, "x" * 3_000_000, "it has more than 1048576 bytes"),
    ],
)
async def test_a_wrong_answer_is_a_failure_that_names_the_status_and_is_not_asked_again(
    status: int, body: str, text: str
) -> None:
    with serving(always(status, body, location="http://127.0.0.1:1/")) as endpoint:
        with pytest.raises(EndpointError) as caught:
            await value(part(endpoint.url))
        assert text in str(caught.value)
        assert len(str(caught.value)) < 300
        assert len(endpoint.bodies) == 1


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "deflate", "x-none"])
async def test_an_encoded_answer_is_refused_and_never_unpacked(encoding: str) -> None:
    """Packed twice, kilobytes become gigabytes: the reader has 256 MiB more than it takes by now."""
    packed = gzip.compress(gzip.compress(bytes(2**29), compresslevel=1)) if "," in encoding else b"x"

    def pack(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(200)
        handler.send_header("content-encoding", encoding)
        handler.send_header("content-length", str(len(packed)))
        handler.end_headers()
        handler.wfile.write(packed)

    with serving(pack) as endpoint, memory_limit(2**28):
        with pytest.raises(EndpointError, match=f"status 200: it is encoded as '{encoding}'"):
            await value(part(endpoint.url))
        assert endpoint.headers[0]["accept-encoding"] == "identity"


FAR = ["Fri, 01 Jan 99999999999999999999 00:00:00 GMT", "Fri, 01 Jan 2100 00:00:00 +99999999999", "-5", "NaN"]


@pytest.mark.parametrize("retry_after", [*FAR, "9" * 400, "1e400", "²", "Fri, 31 Dec 0001 00:00:00 +2359", ""])
async def test_a_wait_that_is_none_is_no_exception(retry_after: str) -> None:
    text = r"answered with status 503(, after 2 tries|; no time is left)"
    with serving(always(503, retry_after=retry_after)) as endpoint, pytest.raises(EndpointError, match=text):
        await value(part(endpoint.url, retries=1))


def completion(text: object) -> str:
    """As OpenAI's servers answer."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


CHAT = {"model": "judge", "prompt": "Is {completion} {answer}? {prompt} {odd} {}"}


async def test_a_model_judges_and_the_last_number_of_its_answer_counts() -> None:
    with serving(always(200, completion("2 of 10 are wrong.\nScore: -0.75."))) as endpoint:
        assert await value(part(endpoint.url, chat=CHAT), "{answer} \ud800") == -0.75
        assert await value(part(endpoint.url, chat={**CHAT, "pattern": r"(\d) of"})) == 2.0
    asked = {"model": "judge", "messages": [{"role": "user", "content": "Is {answer} \ud800 2? 1+1= {odd} {}"}]}
    assert endpoint.bodies[0] == {**asked, "temperature": 0}


async def test_a_judge_is_told_nothing_where_there_is_no_reference() -> None:
    with serving(always(200, completion("1"))) as endpoint:
        judge = part(endpoint.url, chat=CHAT)
        assert judge.endpoint is not None
        await judge.ask(judge.endpoint.body("a", replace(ITEM, answer=None)))
    assert endpoint.bodies[0]["messages"][0]["content"] == "Is a ? 1+1= {odd} {}"


@pytest.mark.parametrize("body", [completion("good"), completion(None), completion([1]), "{}", "[]", "7"])
async def test_a_judge_that_gives_no_number_fails_the_sample(body: str) -> None:
    with serving(always(200, body)) as endpoint:
        with pytest.raises(EndpointError, match="the judge's answer must have a number, got"):
            await value(part(endpoint.url, chat=CHAT))
        assert len(endpoint.bodies) == 1


def test_a_pattern_that_is_none_is_the_users_error() -> None:
    with pytest.raises(ValueError, match=r"http\.chat\.pattern: must be a regular expression"):
        part("http://judge", chat={**CHAT, "pattern": "("})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
async def test_a_number_that_is_none_is_a_bad_value(number: str) -> None:
    with serving(always(200, f'{{"reward": {number}}}')) as endpoint, pytest.raises(BadValueError, match="finite"):
        await value(part(endpoint.url))


async def test_tries_are_counted_when_it_stays_down() -> None:
    with serving(always(500)) as endpoint:
        with pytest.raises(EndpointError, match="answered with status 500, after 3 tries"):
            await value(part(endpoint.url, retries=2))
        assert len(endpoint.bodies) == 3
    with serving(always(500)) as endpoint:
        judge = part(endpoint.url, retries=0)
        with pytest.raises(EndpointError, match="status 500, after 1 tries"):
            await value(judge)


async def test_a_refused_connection_is_tried_again_and_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(EndpointError, match=r"the connection failed: ClientConnectorError.*after 2 tries"):
            await value(part(url, retries=1))


async def test_a_connection_that_the_server_closed_meanwhile_costs_no_sample() -> None:
    def close_after(handler: BaseHTTPRequestHandler, number: int) -> None:
        good(handler, number)
        handler.close_connection = True  # without a word in the header

    with serving(close_after) as endpoint:
        judge = part(endpoint.url)
        assert [await value(judge) for _ in range(3)] == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("drip", [False, True])
async def test_a_hanging_or_dripping_endpoint_is_given_up_before_the_time_limit(drip: bool) -> None:
    done = threading.Event()

    def hang(handler: BaseHTTPRequestHandler, _: int) -> None:
        if drip:
            handler.send_response(200)
            handler.end_headers()
        while not done.wait(0.05):
            if drip:
                handler.wfile.write(b" ")
                handler.wfile.flush()
        handler.close_connection = True

    with serving(hang) as endpoint:
        try:
            with pytest.raises(TimeoutError, match=r"no answer within 1 s"):
                await value(part(endpoint.url, retries=10, timeout_s=1.0))
            assert len(endpoint.bodies) == 1, "no time was left to ask again"
        finally:
            done.set()


TOKEN = "REWARD_TOKEN_JUDGE"


async def test_the_token_is_sent_and_never_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "secret-1234")
    with caplog.at_level("DEBUG"), serving(always(401)) as endpoint:
        judge = part(endpoint.url, tokenVariable=TOKEN)
        with pytest.raises(EndpointError, match="answered with status 401") as caught:
            await value(judge)
    assert endpoint.headers[0]["authorization"] == "Bearer secret-1234"
    assert "secret-1234" not in str(caught.value) + repr(judge) + caplog.text
    monkeypatch.delenv(TOKEN)
    with pytest.raises(UserError, match="tokenVariable: must name an environment variable with a value"):
        part(endpoint.url, tokenVariable=TOKEN)


@pytest.mark.parametrize("host", ["", "a..b", "a:70000", "[::1", "x" * 64])
def test_an_address_that_no_resolver_takes_is_a_line(host: str) -> None:
    with pytest.raises(UserError, match="url: must name a host, got"):
        part(f"http://{host}/score")


def test_a_user_in_the_address_beside_a_token_is_a_line_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret-1234")
    with pytest.raises(UserError, match="url: must be an address without user and password") as caught:
        part("http://me:secret-5678@judge/score", tokenVariable=TOKEN)
    assert "secret" not in str(caught.value)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(good) as endpoint:
        assert await value(part(endpoint.url)) == 0.5


@pytest.mark.parametrize("url", ["http://", "http://[", "https:///x"])
def test_an_address_without_a_host_is_the_users_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"spec\.task\.rewards.*url: must"):
        part(url)
