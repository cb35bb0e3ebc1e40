"""Who may ask: keys from a file, compared in constant time, read again when the file changes."""

import hashlib
import hmac
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagefleet_server.api.quota import MAX_LIMIT, Limits, Quota

CHECK_SECONDS = 1.0
"""Between two looks at the file."""
MAX_FILE_BYTES = 1024 * 1024
MAX_KEY_CHARS = 512
MAX_KEYS = 10_000
"""All are compared for each request: about 2 ms for so many."""
SCHEME = "bearer"
TENANT_CHARS = 16
VISIBLE = re.compile(r"[!-~]+")
OPTION = re.compile(r"(requests_per_minute|concurrent_requests)=([0-9]{1,7})")


class KeyFileError(Exception):
    """The file cannot be used; the message says why, and never holds a key."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever holds one key."""

    name: str
    """Made from the key, tells nothing of it."""
    quota: Quota


class ApiKeys:
    """One key a line, after it its limits; empty lines and those that begin with # do not count.

        KEY [requests_per_minute=N] [concurrent_requests=N] [admin]

    A file that becomes unreadable, empty or wrong keeps the keys that were last read: a rotation in progress locks
    nobody out, and a deleted file opens nothing. Only digests are kept.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float], report: Callable[[str], None]) -> None:
        """Raises KeyFileError when there is no key to begin with. `report` gets one line for each later reading."""
        self._path = path
        self._clock = clock
        self._report = report
        self._stamp = _stamp(path)
        self._tenants: dict[bytes, Tenant] = {}
        self._use(read_key_file(path))
        self._next_check = clock() + CHECK_SECONDS

    def identify(self, authorization: str | None) -> Tenant | None:
        """Who asks with this Authorization header, None when it holds none of the keys.
        Every key is compared, whichever fits."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or len(key) > MAX_KEY_CHARS:
            return None
        given = _digest(key.strip())
        fits = [tenant for digest, tenant in self._tenants.items() if hmac.compare_digest(given, digest)]
        return fits[0] if fits else None

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
            self._use(read_key_file(self._path))
        except KeyFileError as error:
            self._report(f"API keys stay as they were: {error}")
        else:
            self._report(f"API keys read again: {len(self._tenants)} keys")

    def _use(self, keys: dict[bytes, Limits]) -> None:
        """A key that was there before keeps what it has used."""
        before, self._tenants = self._tenants, {}
        for digest, limits in keys.items():
            tenant = before.get(digest)
            if tenant is None:
                tenant = Tenant(digest.hex()[:TENANT_CHARS], Quota(limits, clock=self._clock))
            else:
                tenant.quota.change(limits)
            self._tenants[digest] = tenant


def read_key_file(path: Path) -> dict[bytes, Limits]:
    """Digests of the keys, each with its limits. Raises KeyFileError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise KeyFileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: cannot be read: {error}") from error
    keys: dict[bytes, Limits] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        key, *options = line.split()
        if len(key) > MAX_KEY_CHARS:
            raise KeyFileError(f"{path}: line {number}: the key is longer than {MAX_KEY_CHARS} characters")
        if not VISIBLE.fullmatch(key):
            raise KeyFileError(
                f"{path}: line {number}: a key has visible ASCII characters only; no header holds others"
            )
        digest = _digest(key)
        if digest in keys:
            raise KeyFileError(f"{path}: line {number}: this key is already there, on a line above")
        keys[digest] = _read_limits(options, f"{path}: line {number}")
    if not keys:
        raise KeyFileError(f"{path}: holds no key; write one a line")
    if len(keys) > MAX_KEYS:
        raise KeyFileError(f"{path}: holds {len(keys)} keys; at most {MAX_KEYS} are read")
    return keys


def _read_limits(options: list[str], where: str) -> Limits:
    numbers: dict[str, int] = {}
    for option in options:
        match = OPTION.fullmatch(option)
        if match is not None and 1 <= int(match[2]) <= MAX_LIMIT and match[1] not in numbers:
            numbers[match[1]] = int(match[2])
        elif option != "admin":
            raise KeyFileError(
                f"{where}: what follows the key must be requests_per_minute=N, concurrent_requests=N (N from 1 to "
                f"{MAX_LIMIT}, each at most once) or admin"
            )
    return Limits(
        requests_per_minute=numbers.get("requests_per_minute"),
        concurrent_requests=numbers.get("concurrent_requests"),
        admin="admin" in options,
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the file's content; Kubernetes replaces a mounted secret by another file."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size
