"""Requests to a hub. The endpoint, the token and the headers are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN)."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp

from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.hub import HubFile, HubModel

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""A hub that sends nothing for so long is tried again."""
MAX_LISTING_BYTES = 32 * 1024 * 1024
READ_BYTES = 1024 * 1024
MAX_TEXT = 200


class TransientError(Exception):
    """A try that failed and may be repeated."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class HubClient:
    """One hub, seen with one token."""

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Among them the token's Authorization, which is not sent on to other hosts."""
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.offline and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", self.endpoint):
            raise ModelError(f"HF_ENDPOINT: {self.endpoint[:200]!r} is no address; write it as https://hub.example.org")

    @classmethod
    def from_environment(cls) -> "HubClient":
        """As every other Hugging Face tool would."""
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not listed

        headers = build_hf_headers(library_name="pagefleet")
        return cls(constants.ENDPOINT, headers, bool(constants.HF_HUB_OFFLINE))

    async def list_files(self, model: HubModel) -> Any:
        """The hub's description of the revision, sizes and hashes included. Raises TransientError or ModelError."""
        url = f"{self.endpoint}/api/models/{model.repo}/revision/{quote(model.revision, safe='')}?blobs=true"
        async with self._get(url, f"{model.repo}@{model.revision}", {}) as response:
            text = bytearray()
            async for piece in response.content.iter_chunked(READ_BYTES):
                text += piece
                if len(text) > MAX_LISTING_BYTES:
                    raise ModelError(f"the hub's list of {model.repo} is longer than {MAX_LISTING_BYTES} bytes")
        try:
            return json.loads(text)
        except ValueError as error:
            raise TransientError("the hub's answer is no JSON") from error

    @asynccontextmanager
    async def open(self, model: HubModel, file: HubFile, begin: int) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """(first byte, pieces) of a file from byte `begin` on; from 0 when the hub gives no parts."""
        url = f"{self.endpoint}/{model.repo}/resolve/{quote(model.revision, safe='')}/{quote(file.name)}"
        part = {"Range": f"bytes={begin}-"} if begin else {}
        async with self._get(url, f"{file.name} of {model.repo}", part) as response:
            begins = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {begin}-")
            if response.status == 206 and not begins:
                raise TransientError(f"{file.name}: the hub sent another part than asked for")
            yield (begin if begins else 0), response.content.iter_chunked(READ_BYTES)

    @asynccontextmanager
    async def _get(self, url: str, what: str, extra: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        headers = {**self.headers, "Accept-Encoding": "identity", **extra}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=True, read_bufsize=READ_BYTES) as session,
                session.get(url, headers=headers, max_redirects=5) as response,
            ):
                _check(response, what)
                yield response
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise TransientError(f"{what}: {(str(error) or type(error).__name__)[:MAX_TEXT]}") from error


def _check(response: aiohttp.ClientResponse, what: str) -> None:
    """Raises TransientError for what may pass, ModelError for what will not."""
    status = response.status
    if status in (200, 206):
        return
    said = response.headers.get("X-Error-Message", "")[:MAX_TEXT]
    text = f"{what}: the hub answered {status}" + (f" ({said})" if said else "")
    if status in (401, 403):
        raise ModelError(f"{text}: it does not exist, or is private or gated: check the name, give a token (HF_TOKEN)")
    if status == 404:
        raise ModelError(f"{text}: there is no such model, revision or file")
    if status in (408, 416, 425, 429) or status >= 500:
        wait = response.headers.get("Retry-After", "")
        raise TransientError(text, retry_after_seconds=float(wait) if wait.isdigit() else 0.0)
    raise ModelError(text)
