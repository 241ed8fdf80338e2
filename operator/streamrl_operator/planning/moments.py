"""Times as an API server writes them: RFC 3339, UTC, whole seconds."""

from datetime import UTC, datetime


def stamp(moment: datetime) -> str:
    """As in a status."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(text: str | None, *, now: datetime) -> float | None:
    """Seconds from the written time to `now`; None if there is none, or it is no time."""
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    if moment is None:
        return None
    return (now - (moment if moment.tzinfo else moment.replace(tzinfo=UTC))).total_seconds()
