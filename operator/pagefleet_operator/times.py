"""Times as the API writes them. Pure."""

from datetime import UTC, datetime


def timestamp(now: float) -> str:
    """RFC 3339, whole seconds, UTC."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> float:
    """Seconds since the epoch. Raises ValueError."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
