"""`streamrl ui --cluster` in Chromium: what somebody hostile wrote, and what is live."""

import argparse
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from pages.conftest import DEADLINE_S, TOKEN, Visit, serving_made
from streamrl_cli.cluster.api import connect
from streamrl_cli.ui.cluster_jobs import ClusterJobs
from streamrl_cli.ui.job_pages import jobs_application
from support.api_answers import ApiAnswers, job
from support.hostile import CONTROLS, MARKUP

HOSTILE = f"{MARKUP}<a href=javascript:document.title='run'>x</a>{CONTROLS}"


@asynccontextmanager
async def pages_of(answers: ApiAnswers, folder: Path) -> AsyncIterator[Any]:
    """The pages about the jobs of an API server."""
    await answers.server.start_server()
    args = argparse.Namespace(kubeconfig=answers.kubeconfig(folder), context=None, namespace=None)
    async with connect(args) as cluster:
        jobs = ClusterJobs(cluster, namespaces=["ml"])
        yield jobs_application(jobs, token=TOKEN, names=frozenset())
        await jobs.close()
    await answers.server.close()


@pytest.fixture
def answers() -> ApiAnswers:
    return ApiAnswers()


@pytest.fixture
def base(answers: ApiAnswers, tmp_path: Path) -> Iterator[str]:
    with serving_made(pages_of(answers, tmp_path)) as address:
        yield address


def test_nothing_of_a_hostile_job_is_run_or_fetched(
    answers: ApiAnswers, base: str, visit: Callable[..., Visit]
) -> None:
    one = {"bubbles": {"busy": 1.0}, "wall_s": 2.0, "id": HOSTILE[:400], "pool": HOSTILE[:400]}
    said = {"why": HOSTILE[:400], "longest_first": True, "long_generators": [HOSTILE[:400]], "pools": {}}
    answers.page = answers.page | {"generators": [one], "dispatch": said, "warnings": [{"message": HOSTILE}]}
    answers.jobs = [job("first", message=HOSTILE, checkpointPath=HOSTILE)]
    seen = visit(base)
    seen.go("/")
    page = seen.go("/jobs/ml/first")
    expect(page.locator("main")).to_contain_text("Dispatch, and why")
    assert page.locator("main img, main a[href^=javascript]").count() == 0
    assert seen.is_clean()


def test_a_page_follows_its_job(answers: ApiAnswers, base: str, visit: Callable[..., Visit]) -> None:
    seen = visit(base)
    expect(seen.go("/").locator("tr", has_text="ml/first")).to_contain_text("5/20")
    answers.jobs[0]["status"]["step"] = 9
    answers.jobs[0]["metadata"]["resourceVersion"] = "8"
    expect(seen.page.locator("tr", has_text="ml/first")).to_contain_text("9/20", timeout=DEADLINE_S * 1000)
    seen.page.locator("a", has_text="ml/first").click()
    expect(seen.page.locator("h1")).to_have_text("ml/first")
    answers.page = None
    expect(seen.page.locator("main")).to_contain_text("The scheduler is not reached", timeout=DEADLINE_S * 1000)
    assert seen.is_clean()
