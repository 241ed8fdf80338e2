"""JSON of requests and of tool calls: what is read of it, and what is refused."""

import json
from typing import Any

MAX_DEPTH = 100
"""Maximum levels of a request's JSON, and of a call's arguments."""


def parsed(text: str, *, otherwise: object) -> Any:  # noqa: ANN401 - JSON
    """`otherwise` also where it holds half of a surrogate pair, NaN or infinity, which no message carries."""
    try:
        value = json.loads(text)
        check_text(value, allow_nan=False)
    except (ValueError, RecursionError):
        return otherwise
    return value


def check_text(value: object, *, allow_nan: bool = True) -> None:
    """Check that JSON can be written as UTF-8, and that functions may recurse into it. Raises `ValueError`, `RecursionError`."""
    json.dumps(value, ensure_ascii=False, allow_nan=allow_nan).encode()
    if (depth := _depth(value)) > MAX_DEPTH:
        raise ValueError(f"it has {depth} levels, and {MAX_DEPTH} are read")


def _depth(value: object) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)
