"""Which web pages of other origins may call this API from a browser (the Fetch standard's CORS protocol)."""

from typing import Final

MAX_AGE_SECONDS: Final = 600
METHODS: Final = "GET, POST"


class Cors:
    """Allowed origins; `*` allows all. Without any, a browser keeps every other origin out."""

    def __init__(self, origins: str) -> None:
        """`origins`: separated by commas, such as `https://chat.example.org`."""
        self._origins = frozenset(origin.strip() for origin in origins.split(",") if origin.strip())

    def answer_headers(self, origin: str | None) -> dict[str, str]:
        """For a response to a request from `origin`; empty when the page may not read it."""
        if origin is None or not self._origins & {origin, "*"}:
            return {}
        allowed = "*" if "*" in self._origins else origin
        return {"Access-Control-Allow-Origin": allowed, "Vary": "Origin"}

    def preflight_headers(self, origin: str | None, asked_headers: str | None) -> dict[str, str]:
        """For the answer to a preflight; empty when the page may not ask."""
        headers = self.answer_headers(origin)
        if not headers:
            return {}
        return headers | {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": (asked_headers or "")[:1024],
            "Access-Control-Max-Age": str(MAX_AGE_SECONDS),
        }
