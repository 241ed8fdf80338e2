"""Dashboards drawn in a real Chromium, from what a Prometheus answers; with STREAMRL_PICTURES=FOLDER the pictures stay there."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from support.chart import CHART
from support.chromium import CHROMIUM, FLAGS
from support.prometheus import Prometheus
from support.runs import wait_for

PICTURES = os.environ.get("STREAMRL_PICTURES")
_DRAWER = CHART.parents[1] / "tools/draw_dashboards.py"
_WIDTH, _QUALITY = 1000, 55
_DRAW_S = 300.0


def drawn(boards: Mapping[str, Mapping[str, str]], *, prometheus: Prometheus, folder: Path, minutes: int) -> list[str]:
    """Draw each, with these variables; "BOARD, PANEL" of what is empty, and every error of a script. For pictures so many minutes must be there."""
    assert Path(CHROMIUM).exists(), "this needs Debian's package chromium: tools/cluster_packages.sh installs it"
    if PICTURES:
        old = f"up offset {minutes}m"
        wait_for(lambda: prometheus.has_data(old), what=f"data for {old}", deadline_s=120 * minutes)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": _WIDTH, "height": 900})
        page.set_default_timeout(_DRAW_S * 1000)
        found: list[str] = []
        page.on("pageerror", lambda error: found.append(str(error)))
        for uid, variables in boards.items():
            found += _draw(uid, variables, prometheus=prometheus, folder=folder, page=page, minutes=minutes)
        browser.close()
    return found


def _draw(
    uid: str, variables: Mapping[str, str], *, prometheus: Prometheus, folder: Path, page: Page, minutes: int
) -> list[str]:
    file = folder / f"{uid}.html"
    chosen = [f"{name}={value}" for name, value in variables.items()]
    board = CHART / f"files/dashboards/{uid}.json"
    command = [sys.executable, _DRAWER, board, prometheus.url, str(minutes), file, *chosen]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DRAW_S).stdout.splitlines()
    page.goto(file.as_uri())
    assert page.locator("section").count() > len(told), "a dashboard is more than its empty panels"
    name = uid.replace("streamrl-", "dashboard-")
    page.screenshot(path=Path(PICTURES or folder) / f"{name}.jpg", type="jpeg", quality=_QUALITY, full_page=True)
    return [f"{uid}, {title}" for title in told]
