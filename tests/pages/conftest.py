"""A real Chromium that looks at the pages of `streamrl ui`, over real sockets. It fetches nothing of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from streamrl_cli.ui.pages import application
from streamrl_pages.server import PageServer
from streamrl_pages.website import TIMEOUT_S
from support.chromium import CHROMIUM, FLAGS

TOKEN = "the token of the tests"
DEADLINE_S = 120


def serving(folder: Path) -> AbstractContextManager[str]:
    """The pages of a folder; gives their address."""

    @asynccontextmanager
    async def made():
        yield application(folder, token=TOKEN, names=frozenset())

    return serving_made(made())


@contextmanager
def serving_made(made: AbstractAsyncContextManager[Any]) -> Iterator[str]:
    """The application that a context makes in a loop of its own; gives its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="pages", daemon=True)
    thread.start()

    def call(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(DEADLINE_S)

    server = PageServer(call(made.__aenter__()), timeout_s=TIMEOUT_S)
    port = call(server.start(host="127.0.0.1", port=0))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        call(server.close())
        call(made.__aexit__(None, None, None))
        call(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


@dataclass
class Visit:
    """A page in a browser that has signed in, and all that came of looking at it."""

    page: Page
    base: str
    requests: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Errors of scripts, and what the policy of the page refused."""

    def go(self, path: str) -> Page:
        """Open a page, with its figures drawn."""
        self.page.goto(self.base + path)
        if self.page.locator("#f0").count():
            self.page.locator("#f0").scroll_into_view_if_needed()
            self.page.locator("#f0 .main-svg").first.wait_for(timeout=DEADLINE_S * 1000)
        return self.page

    def run(self) -> str:
        """Path of the first run."""
        self.go("/")
        return self.page.locator("td a").first.get_attribute("href")

    def is_clean(self) -> bool:
        """Nothing was asked of anybody else, no script failed, nothing was refused."""
        strange = [url for url in self.requests if not url.startswith((self.base, "data:"))]
        assert (strange, self.faults) == ([], [])
        return True


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert Path(CHROMIUM).exists(), "these tests need Debian's package chromium: tools/cluster_packages.sh installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Sign in, with a context's options (`color_scheme`, `viewport`)."""
    contexts: list[BrowserContext] = []

    def begin(base: str, **options) -> Visit:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(DEADLINE_S * 1000)
        found = Visit(page=context.new_page(), base=base)
        found.page.goto(f"{base}/#token={TOKEN.replace(' ', '+')}")
        found.page.locator("header").wait_for()
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("pageerror", lambda error: found.faults.append(str(error)))
        found.page.on("dialog", lambda dialog: found.faults.append(dialog.message))
        found.page.on("console", lambda line: found.faults.append(line.text) if line.type == "error" else None)
        return found

    yield begin
    for context in contexts:
        context.close()
