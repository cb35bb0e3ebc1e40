"""Reading and writing kubeconfig files, as far as static credentials go."""

import base64
import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class KubeconfigError(Exception):
    """The file is missing, malformed, or asks for credentials that this client cannot give."""


@dataclass(frozen=True)
class Kubeconfig:
    """How to reach one API server."""

    server: str
    """Base URL without a trailing slash."""
    token: str | None = None
    """Bearer token; None sends no Authorization header."""
    namespace: str = "default"
    """The context's namespace."""
    ssl_context: ssl.SSLContext | None = None
    """None for plain http or the system's own trust."""

    @property
    def node_token(self) -> str:
        """What the cluster's nodes ask of callers; empty when this file holds no token."""
        token = self.token or self.server.partition("/token/")[2]
        return node_token(token) if token else ""

    @classmethod
    def load(cls, path: Path | str) -> "Kubeconfig":
        """The current context of a kubeconfig file. Raises KubeconfigError."""
        try:
            document = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise KubeconfigError(f"cannot read kubeconfig {path}: {error}") from error
        try:
            context = _named(document, "contexts", document["current-context"])["context"]
            cluster = _named(document, "clusters", context["cluster"])["cluster"]
            user = _named(document, "users", context["user"])["user"] if context.get("user") else {}
            server = str(cluster["server"])
        except (KeyError, TypeError) as error:
            raise KubeconfigError(f"kubeconfig {path} is incomplete: no {error}") from error
        if unsupported := {"exec", "auth-provider", "username"} & set(user or {}):
            raise KubeconfigError(
                f"kubeconfig {path}: {unsupported.pop()!r} is not supported; use a token or certificate"
            )
        token = user.get("token")
        if user.get("tokenFile"):
            token = Path(user["tokenFile"]).read_text().strip()
        context_tls = _ssl_context(cluster, user, Path(path).parent) if server.startswith("https:") else None
        return cls(server.rstrip("/"), token, context.get("namespace") or "default", context_tls)

    def write(self, path: Path, *, name: str) -> None:
        """Write a file with this one context, readable by its owner only."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": self.server}}],
            "users": [{"name": name, "user": {"token": self.token} if self.token else {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": self.namespace}}],
            "current-context": name,
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            yaml.safe_dump(document, file, sort_keys=False)
        temporary.replace(path)


def node_token(api_token: str) -> str:
    """The token that an API server shows to the nodes of its cluster, so that they serve nobody else."""
    return hashlib.sha256(f"node:{api_token}".encode()).hexdigest()


def _named(document: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    for entry in document[section]:
        if entry["name"] == name:
            return dict(entry)
    raise KeyError(f"{section}[name={name}]")


def _ssl_context(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext:
    authority = cluster.get("certificate-authority-data")
    context = ssl.create_default_context(
        cafile=str(folder / cluster["certificate-authority"]) if cluster.get("certificate-authority") else None,
        cadata=base64.b64decode(authority).decode() if authority else None,
    )
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if user.get("client-certificate"):
        context.load_cert_chain(str(folder / user["client-certificate"]), str(folder / user["client-key"]))
    elif user.get("client-certificate-data"):
        raise KubeconfigError(
            "client-certificate-data is not supported; give client-certificate and client-key as files"
        )
    return context
