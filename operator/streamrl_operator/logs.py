"""Logs as one JSON object a line, on standard error. Objects and headers are never logged, so no secret can be."""

import json
import logging
import sys
from datetime import UTC, datetime

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_CHARS = 2000


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, and what the caller gave as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("streamrl_operator."),
            "message": record.getMessage()[:_MAX_CHARS],
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def begin(level: str) -> None:
    """All logs of this process, from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf would say of each event that it was handled, that it takes no signals outside of the main thread, and what ended it, with a trace:
    # the first two are as they should be, the third is told where it is begun again (jobs.py).
    for name in ("activities", "objects", "_core.engines", "_core.reactor.orchestration", "_core.reactor.running"):
        logging.getLogger(f"kopf.{name}").setLevel(logging.CRITICAL)
