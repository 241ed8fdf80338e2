"""A real generator process over real gRPC: weights, requests, swaps, breaks, ends."""

import asyncio
import json
import math
import re
import signal
from pathlib import Path

import grpc
import pytest

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR
from streamrl.keys import DIR_ENDPOINTS, DIR_METRICS, ENV_POOL, ENV_SIGNALS_PORT
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_job
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.engines import create_simulated
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.link import GeneratorLink
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.generator.settings import GeneratorSettings
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.process.environment_variables import WorkerVariables
from streamrl_workers.stream.channel import SchedulerLostError
from streamrl_workers.stream.packing import pack_int32
from support.generator_process import NAME, TOKEN, generator_bench, start_generator
from support.jobs import simulated_job
from support.metric_pages import series
from support.runs import DEADLINE_S

SLOW = ({"batch": 1, "milliseconds": 20.0},)
"""A latency curve by which 50 tokens take a second."""


async def test_a_whole_life(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        hello = await bench.greet()
        assert (hello.generator_id, hello.pool, hello.slots) == (NAME, "sim", 4)
        assert not hello.HasField("version")
        await bench.announce(0)
        loaded = await bench.hear("loaded 0")
        assert loaded.engine_hash == loaded.version.hash == bench.store.versions()[0].hash
        await bench.issue(*range(1, 11))  # more than there are slots
        for lease in range(1, 11):
            await bench.hear(f"end {lease}")
        for lease, got in bench.leases.items():
            assert got.end.finish_reason == "stop"
            assert len(got.tokens) == 50
            assert {step for step, _ in got.spans} == {0}
            assert sum(count for _, count in got.spans) == 50
            assert got.prompts[0] == pack_int32(tuple(f"prompt {lease}".encode()))
            assert not any(got.prompts[1:])
            assert got.end.generate_s > 0
        heartbeat = await bench.hear("heartbeat")
        assert math.isclose(sum(heartbeat.bubble_seconds.values()), heartbeat.wall_seconds, rel_tol=1e-9)
        numbers = await _get(_signals(tmp_path), "/numbers")
        assert '"tokens": 500' in numbers
        assert "streamrl_generator_tokens_total" in await _get(_signals(tmp_path), "/metrics")
        await bench.scheduler.say(stop=pb.Stop(reason="done"))
        assert await bench.exit_code() == EXIT_DONE
    last = list(read_jsonl(tmp_path / DIR_METRICS / f"{NAME}.jsonl"))[-1]
    assert math.isclose(sum(last["parts"].values()), last["wall_s"], rel_tol=0.01)
    assert last["parts"]["busy"] > 0


async def test_keys_and_values_are_told_in_tokens(tmp_path: Path):
    async with generator_bench(tmp_path, kvCacheTokens=500, latency=SLOW) as bench:
        hello = await bench.greet()
        assert (hello.kv_capacity_tokens, hello.shares_prompts) == (500, False)
        await bench.announce(0)
        await bench.issue(1, 2)
        while not (heartbeat := await bench.hear("heartbeat")).kv_used_tokens:
            bench.order.clear()
        assert heartbeat.kv_used_tokens >= 2 * len("prompt 1")
        assert '"kv_capacity_tokens": 500' in await _get(_signals(tmp_path), "/status")
        page = await _get(_signals(tmp_path), "/metrics")
        assert re.search(r"^streamrl_kv_capacity_tokens\{.*\} 500\.0$", page, re.MULTILINE)
        assert "streamrl_kv_used_tokens{" in page
        await bench.scheduler.say(stop=pb.Stop(reason="done"))
        assert await bench.exit_code() == EXIT_DONE


async def test_an_engine_without_a_bound_tells_none(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        hello = await bench.greet()
        assert not hello.HasField("kv_capacity_tokens")
        heartbeat = await bench.hear("heartbeat")
        assert not heartbeat.HasField("kv_used_tokens")
        assert '"kv_used_tokens": null' in await _get(_signals(tmp_path), "/status")
        await bench.scheduler.say(stop=pb.Stop(reason="done"))
        assert await bench.exit_code() == EXIT_DONE


def _signals(folder: Path) -> str:
    return json.loads((folder / DIR_ENDPOINTS / f"{NAME}.json").read_text())["signals"]


async def _get(address: str, path: str) -> str:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()
    writer.close()
    return answer.decode()


async def test_requests_wait_for_the_first_weights(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.greet(lease_s=1.0)
        await bench.issue(1, pinned=[1])
        while (await bench.hear("heartbeat")).waiting != 1:
            bench.order.clear()
        assert bench.leases == {}
        await bench.announce(3)
        await bench.hear("end 1")
        assert bench.order.index("loaded 3") < bench.order.index("end 1")
        assert {step for step, _ in bench.leases[1].spans} == {3}


async def test_a_swap_waits_for_pinned_requests_only(tmp_path: Path):
    async with generator_bench(tmp_path, latency=SLOW, meanTokens=9000.0) as bench:
        await bench.greet()
        await bench.announce(0)
        await bench.hear("loaded 0")
        await bench.issue(2)  # for longer than the test
        await bench.hear("progress 2")
        await bench.issue(1, prefix=pack_int32(range(8950)), pinned=[1])
        await bench.announce(1)
        await bench.hear("loaded 1")
        assert bench.order.index("end 1") < bench.order.index("loaded 1")
        other = bench.leases[2]
        while other.spans[-1][0] == 0:
            bench.order.clear()
            await bench.hear("progress 2")
    assert {step for step, _ in bench.leases[1].spans} == {0}
    assert len(bench.leases[1].tokens) == 50
    assert sorted({step for step, _ in other.spans}) == [0, 1]
    assert [step for step, _ in other.spans] == sorted(step for step, _ in other.spans)
    assert sum(count for _, count in other.spans) == len(other.tokens)
    assert other.end is None


async def test_a_newer_announcement_ends_a_pull_under_way(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.greet()
        await bench.announce(1, address="127.0.0.1:9")  # nobody is there: this pull would last 120 s
        await bench.announce(2)
        await bench.hear("loaded 2")
        await bench.announce(2)  # again: it is there already
        bench.order.clear()
        loaded = await bench.hear("loaded 2")
        assert (loaded.fetch_s, loaded.load_s) == (0.0, 0.0)


async def test_weights_that_are_gone_are_told_and_the_old_ones_stay(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.greet()
        await bench.announce(0)
        await bench.hear("loaded 0")
        gone = pb.VersionName(attempt=1, step=9, hash=b"nothing like that")
        await bench.scheduler.say(weights=pb.WeightsAvailable(version=gone, address=bench.weights_address))
        assert "is not kept" in (await bench.hear("failed 9")).error
        await bench.issue(1)
        await bench.hear("end 1")
        assert {step for step, _ in bench.leases[1].spans} == {0}
        page = (await _get(_signals(tmp_path), "/metrics")).partition("\r\n\r\n")[2].encode()
        counted = {name: series(page, f"streamrl_weights_{name}_total") for name in ("failures", "pulled_versions")}
        assert counted == {"failures": 1, "pulled_versions": 1}


async def test_after_a_break_everything_old_is_forgotten(tmp_path: Path):
    async with generator_bench(tmp_path, latency=SLOW) as bench:
        first = await bench.greet()
        await bench.announce(0)
        await bench.hear("loaded 0")
        await bench.issue(1, 2, 3, 4, 5)
        await bench.hear("progress 1")
        await bench.restart_scheduler()
        again = await bench.greet()
        assert again.instance == first.instance
        assert again.version == bench.store.versions()[0]
        bench.leases.clear()
        await bench.issue(1, prefix=pack_int32(range(45)))  # a number that was in use before
        await bench.hear("end 1")
        assert set(bench.leases) == {1}
        assert len(bench.leases[1].tokens) == 5


async def test_cancelled_requests_are_silent_and_free_their_slots(tmp_path: Path):
    async with generator_bench(tmp_path, latency=SLOW, meanTokens=5000.0) as bench:
        await bench.greet()
        await bench.announce(0)
        await bench.issue(1, 2, 3, 5)  # all slots, for longer than the test
        await bench.issue(4, 6, prefix=pack_int32(range(4998)))
        await bench.hear("progress 1")
        await bench.scheduler.say(cancel=pb.CancelBatch(leases=[1, 2, 3, 5, 77]))
        await bench.hear("end 4")
        await bench.hear("end 6")
        assert all(bench.leases[lease].end is None for lease in bench.leases if lease not in (4, 6))


async def test_while_it_generates_heartbeats_do_not_wait_for_the_lease(tmp_path: Path):
    async with generator_bench(tmp_path, latency=SLOW, meanTokens=9000.0) as bench:
        await bench.greet(lease_s=3600.0)
        await bench.announce(0)
        await bench.issue(1)  # for longer than the test
        tokens: set[int] = set()
        async with asyncio.timeout(DEADLINE_S):
            while len(tokens) < 2:
                bench.order.clear()
                heartbeat = await bench.hear("heartbeat")
                if heartbeat.active:
                    tokens.add(heartbeat.tokens)


async def test_drain_ends_what_was_accepted(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.greet()
        await bench.announce(0)
        await bench.issue(*range(8))
        await bench.scheduler.say(drain=pb.Drain())
        await bench.hear("drained")
        assert all(bench.leases[lease].end for lease in range(8))


async def test_a_term_signal_lets_it_finish_what_it_has_and_go(tmp_path: Path):
    async with generator_bench(tmp_path, latency=SLOW) as bench:
        await bench.greet()
        await bench.announce(0)
        await bench.issue(*range(1, 7))  # more than there are slots
        await bench.hear("progress 1")
        bench.process.terminate()
        await bench.hear("leaving")
        await bench.issue(7)  # it crosses the word of leaving
        assert bench.process.returncode is None
        await bench.scheduler.say(drain=pb.Drain())
        await bench.hear("drained")
        assert await bench.exit_code() == EXIT_DONE
        assert all(len(bench.leases[lease].tokens) == 50 for lease in range(1, 8))
        assert all(bench.leases[lease].end.finish_reason == "stop" for lease in range(1, 8))


async def test_an_idle_one_leaves_at_once(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.greet()
        await bench.hear("heartbeat")
        bench.process.terminate()
        await bench.hear("leaving")
        await bench.scheduler.say(drain=pb.Drain())
        await bench.hear("drained")
        assert await bench.exit_code() == EXIT_DONE


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_asked_twice_it_ends_now(tmp_path: Path, second: signal.Signals):
    async with generator_bench(tmp_path, latency=SLOW, meanTokens=9000.0) as bench:
        await bench.greet()
        await bench.announce(0)
        await bench.issue(1)
        await bench.hear("progress 1")
        bench.process.terminate()
        await bench.hear("leaving")
        bench.process.send_signal(second)
        assert await bench.exit_code() == EXIT_RETRY
        assert bench.leases[1].end is None


async def test_one_that_leaves_does_not_wait_for_a_scheduler_that_is_gone(tmp_path: Path):
    async with generator_bench(tmp_path, latency=SLOW, meanTokens=9000.0) as bench:
        await bench.greet()
        await bench.announce(0)
        await bench.issue(1)
        await bench.hear("progress 1")
        bench.process.terminate()
        await bench.hear("leaving")
        await bench.server.stop(grace=None)
        assert await bench.exit_code() == EXIT_DONE


async def test_without_a_link_there_is_nothing_to_finish(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.greet()
        await bench.hear("heartbeat")
        await bench.server.stop(grace=None)
        bench.process.terminate()
        assert await bench.exit_code() == EXIT_DONE


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({ENV_POOL: "other"}, "STREAMRL_POOL: must name a pool of the job (sim), got 'other'"),
        ({ENV_SIGNALS_PORT: "http"}, "STREAMRL_SIGNALS_PORT: must be a whole number of at least 0, got 'http'"),
        ({ENV_POOL: ""}, "STREAMRL_POOL: must be set in a worker's environment; start workers with `streamrl run`"),
    ],
)
async def test_a_wrong_environment_is_one_line(tmp_path: Path, environment, line):
    async with generator_bench(tmp_path) as bench:
        bench.process.kill()
        await bench.process.wait()
        (tmp_path / "generator.log").unlink()
        process = await start_generator(tmp_path, address=bench.address, **environment)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == EXIT_USER_ERROR
    assert (tmp_path / "generator.log").read_text() == line + "\n"


async def test_a_wrong_token_and_a_port_in_use_are_one_line(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.greet()
        port = _signals(tmp_path).rsplit(":", 1)[1]
        for changes, text in (
            ({"token": "wrong"}, "STREAMRL_TOKEN: is not the token of the scheduler"),
            ({ENV_SIGNALS_PORT: port}, f"STREAMRL_SIGNALS_PORT: port {port} is in use"),
        ):
            process = await start_generator(tmp_path, address=bench.address, **changes)
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == EXIT_USER_ERROR
            assert text in (tmp_path / "generator.log").read_text().splitlines()[-1]


async def test_one_that_comes_when_the_run_is_over_is_done(tmp_path: Path):
    async with generator_bench(tmp_path) as bench:
        await bench.hear("hello")
        await bench.scheduler.say(stop=pb.Stop(reason="done"))
        assert await bench.exit_code() == EXIT_DONE


def _link(address: str, *, lost_after_s: float) -> GeneratorLink:
    engine = create_simulated(EngineOptions(spec=_spec()))
    recorder = Recorder(sink=None, metrics=None)
    outbox = GeneratorOutbox()
    loop = EngineLoop(engine, pull=_no_pull, outbox=outbox, recorder=recorder)
    job = parse_job(simulated_job())
    settings = GeneratorSettings(
        run_dir=Path(),
        process=NAME,
        pool=job.spec.generators[0],
        spec=job.spec,
        metadata=job.metadata,
        scheduler_address=address,
        signals_port=0,
        model_path=None,
        threads=None,
        variables=WorkerVariables(token=TOKEN),
    )
    return GeneratorLink(
        loop, outbox=outbox, recorder=recorder, settings=settings, instance="x", lost_after_s=lost_after_s
    )


async def test_without_a_scheduler_the_link_gives_up_and_says_so():
    link = _link("127.0.0.1:9", lost_after_s=0.1)
    with pytest.raises(SchedulerLostError, match=r"awaited the scheduler at 127\.0\.0\.1:9 for \d+ s; last:"):
        async with asyncio.timeout(DEADLINE_S):
            await link.run()


async def test_one_whose_name_another_has_tries_again_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with generator_bench(tmp_path) as bench:
        bench.scheduler.refusal = (grpc.StatusCode.ALREADY_EXISTS, "another has the name")
        link = _link(bench.address, lost_after_s=3.0)
        with pytest.raises(SchedulerLostError, match="last: link broken: ALREADY_EXISTS: another has the name"):
            async with asyncio.timeout(DEADLINE_S):
                await link.run()
    assert caplog.messages.count("link broken: ALREADY_EXISTS: another has the name") == 1
    assert "ALREADY_EXISTS" in link.ill()


async def _no_pull(_target):
    raise AssertionError("nothing is announced")


def _spec():
    from streamrl.spec.generators import SimulatedEngineSpec

    return SimulatedEngineSpec()


@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT])
async def test_one_that_is_refused_ends_with_the_reason(tmp_path: Path, code: grpc.StatusCode):
    async with generator_bench(tmp_path) as bench:
        bench.scheduler.refusal = (code, "this is not understood")
        assert await bench.exit_code() == EXIT_RETRY
    log = (tmp_path / "generator.log").read_text().splitlines()
    assert log[-1] == f"scheduler and generator do not agree: {code.name}: this is not understood"
