"""Server-sent events as OpenAI clients read them."""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers skip it."""
DONE = b"data: [DONE]\n\n"


def encode_event(document: bytes) -> bytes:
    """One event. JSON escapes every line break, so the document is one line."""
    return b"data: " + document + b"\n\n"
