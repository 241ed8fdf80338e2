"""The scheduler's `/numbers` page, read from the run folder's endpoint."""

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from streamrl import keys
from streamrl_cli.runner.folder import RunFolder

NUMBERS_TIMEOUT_S = 2.0
"""One read of the scheduler's numbers; a busy scheduler is asked again a second later."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""`http_proxy` of the environment is for the world outside, not for the loopback address."""


async def fetch_numbers(folder: RunFolder) -> Mapping[str, Any] | None:
    """The page; None while the scheduler starts, restarts, is too busy to answer or is gone."""
    return await asyncio.to_thread(_fetch, folder)


def _fetch(folder: RunFolder) -> Mapping[str, Any] | None:
    try:
        address = json.loads(folder.file(keys.DIR_ENDPOINTS, "scheduler.json").read_text())["signals"]
        with _DIRECT.open(f"http://{address}/numbers", timeout=NUMBERS_TIMEOUT_S) as reply:
            return dict(json.load(reply))
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return None
