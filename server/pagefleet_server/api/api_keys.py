"""Who may ask: keys from a file, compared in constant time, read again when the file changes."""

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path

CHECK_SECONDS = 1.0
"""Between two looks at the file."""
MAX_FILE_BYTES = 1024 * 1024
MAX_KEY_CHARS = 512
SCHEME = "bearer"
TENANT_CHARS = 16


class KeyFileError(Exception):
    """The file cannot be used; the message says why."""


class ApiKeys:
    """One key a line; empty lines and those that begin with # do not count.

    A file that becomes unreadable or empty keeps the keys that were last read: a rotation in progress locks nobody out,
    and a deleted file opens nothing. Only digests are kept.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float], report: Callable[[str], None]) -> None:
        """Raises KeyFileError when there is no key to begin with. `report` gets one line for each later reading."""
        self._path = path
        self._clock = clock
        self._report = report
        self._stamp = _stamp(path)
        self._digests = read_key_file(path)
        self._next_check = clock() + CHECK_SECONDS

    def identify(self, authorization: str | None) -> str | None:
        """Who asks: a name made from the key that an Authorization header holds, None when it is none of them.
        Every key is compared, whichever fits."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or len(key) > MAX_KEY_CHARS:
            return None
        given = _digest(key.strip())
        fits = [digest for digest in self._digests if hmac.compare_digest(given, digest)]
        return fits[0].hex()[:TENANT_CHARS] if fits else None

    def _refresh(self) -> None:
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = read_key_file(self._path)
        except KeyFileError as error:
            self._report(f"API keys stay as they were: {error}")
        else:
            self._report(f"API keys read again: {len(self._digests)} keys")


def read_key_file(path: Path) -> list[bytes]:
    """Digests of the keys. Raises KeyFileError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise KeyFileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise KeyFileError(f"{path}: holds no key; write one a line")
    if any(len(key) > MAX_KEY_CHARS for key in keys):
        raise KeyFileError(f"{path}: a key is longer than {MAX_KEY_CHARS} characters")
    return [_digest(key) for key in keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the file's content; Kubernetes replaces a mounted secret by another file."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size
