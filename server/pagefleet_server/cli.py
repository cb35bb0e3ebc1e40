"""Command line and environment, generated from the settings: precedence is flag, then environment, then default."""

import argparse
import ast
import difflib
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import version
from itertools import groupby
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec

from pagefleet_server.settings import Choices, ServerSettings

ENV_PREFIX = "PAGEFLEET_"
SERVICE_LINK = "tcp://"
"""Kubernetes gives pods PAGEFLEET_PORT=tcp://... when a Service of that namespace is named pagefleet: not ours."""
ORIGIN = re.compile(r"\*|https?://[^\s/?#,]+")
"""What a browser sends as Origin, or all of them."""
SIZE_UNITS = {"": 1, "b": 1}
SIZE_UNITS |= {f"{u}ib": 1024**i for i, u in enumerate("kmgt", 1)}
SIZE_UNITS |= {f"{u}i": 1024**i for i, u in enumerate("kmgt", 1)}
SIZE_UNITS |= {f"{u}b": 1000**i for i, u in enumerate("kmgt", 1)}


class BadSettingError(Exception):
    """A flag or variable has a value that cannot be used; the message has what, value and bound."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting as the command line sees it."""

    path: tuple[str, ...]
    """Field names from ServerSettings down."""
    name: str
    """Without dashes in front, the unit's suffix dropped: `kv-cache-memory`."""
    kind: type
    """str, int, float or bool."""
    required: bool
    default: object
    doc: str
    choices: tuple[str, ...] = ()
    meta: msgspec.Meta | None = None
    """Bounds."""

    @property
    def option(self) -> str:
        """`--kv-cache-memory`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """`PAGEFLEET_KV_CACHE_MEMORY`."""
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def negated(self) -> bool:
        """A switch that is on by default is turned off by `--no-...`."""
        return self.kind is bool and self.default is True

    @property
    def help(self) -> str:
        """What it does."""
        return f"Turns this off: {self.doc}" if self.negated else self.doc

    @property
    def subject(self) -> str:
        """`Model`: the heading that it stands under."""
        return self.path[-2].replace("_", " ").capitalize()

    @property
    def is_size(self) -> bool:
        """Whether the value is bytes and may be written as 2GiB."""
        return self.path[-1].endswith("_bytes")


def list_flags(settings: type = ServerSettings, path: tuple[str, ...] = ()) -> Iterator[Flag]:
    """Every leaf field of the settings tree, in order."""
    hints = get_type_hints(settings, include_extras=True)
    docs = _field_docs(settings)
    assert is_dataclass(settings)
    for item in fields(settings):
        hint, here = hints[item.name], (*path, item.name)
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from list_flags(hint, here)
            continue
        kind, notes = _unwrap(hint)
        yield Flag(
            path=here,
            name=_name_flag(item.name, negated=kind is bool and item.default is True),
            kind=kind,
            required=item.default is MISSING,
            default=None if item.default is MISSING else item.default,
            doc=docs[item.name],
            choices=next((note.values for note in notes if isinstance(note, Choices)), ()),
            meta=next((note for note in notes if isinstance(note, msgspec.Meta)), None),
        )


def _name_flag(field_name: str, *, negated: bool) -> str:
    name = re.sub("_(bytes|seconds)$", "", field_name).replace("_", "-")
    return f"no-{name}" if negated else name


def parse_value(flag: Flag, text: str, source: str) -> object:
    """The value of `text`; `source` (the flag or variable) goes into the message. Raises BadSettingError."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadSettingError(f"{source}: {text[:100]!a} is no UTF-8 text")  # bytes of a shell with another encoding
    if flag.kind is str:
        if flag.choices and text not in flag.choices:
            raise BadSettingError(f"{source}: {text[:100]!r} is none of {', '.join(flag.choices)}")
        if not text and flag.default != "":
            raise BadSettingError(f"{source}: must not be empty")
        if flag.meta is not None and flag.meta.pattern is not None and not re.fullmatch(flag.meta.pattern, text):
            raise BadSettingError(f"{source}: {text[:100]!r} does not look like it must: {flag.doc}")
        return text
    if flag.kind is bool:
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in known:
            raise BadSettingError(f"{source}: {text[:100]!r} is neither true nor false")
        return known[text.lower()] is not flag.negated
    number = _parse_size(text, source) if flag.is_size else _parse_number(flag.kind, text, source)
    meta = flag.meta or msgspec.Meta()
    for out_of_bounds, bound in (
        (meta.ge is not None and number < meta.ge, f"at least {meta.ge}"),
        (meta.gt is not None and number <= meta.gt, f"more than {meta.gt}"),
        (meta.le is not None and number > meta.le, f"at most {meta.le}"),
    ):
        if out_of_bounds:
            raise BadSettingError(f"{source}: {text[:100]} is out of bounds, it must be {bound}")
    return number


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> ServerSettings:
    """Settings from flags and environment. Raises BadSettingError; exits by itself for --help and --version."""
    flags = list(list_flags())
    known, unknown = _make_parser(flags).parse_known_args(list(argv))
    if unknown:
        guess = _nearest(unknown[0].partition("=")[0], (flag.option for flag in flags))
        raise BadSettingError(f"{unknown[0][:100]!r} is no flag{guess}; --help lists them")
    given = vars(known)
    tree: dict[str, Any] = {}
    for flag in flags:
        if given[flag.name] is not None:
            value = parse_value(flag, given[flag.name], flag.option)
        elif not environ.get(flag.variable, SERVICE_LINK).startswith(SERVICE_LINK):
            value = parse_value(flag, environ[flag.variable], flag.variable)
        elif flag.required:
            raise BadSettingError(f"{flag.option} is required (or {flag.variable}): {flag.doc}")
        else:
            value = flag.default
        branch = tree
        for name in flag.path[:-1]:
            branch = branch.setdefault(name, {})
        branch[flag.path[-1]] = value
    settings = msgspec.convert(tree, ServerSettings)
    _check_together(settings)
    return settings


def check_machine(settings: ServerSettings, *, num_cpus: int) -> None:
    """What the machine cannot do, as far as it shows before a model is loaded. Raises BadSettingError."""
    threads = settings.engine.model.threads
    if threads is not None and threads > num_cpus:
        raise BadSettingError(
            f"--threads: {threads} are more than the {num_cpus} CPUs of this machine; they wait for each other many "
            "times in every step; lower it, or leave it out"
        )


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like one of ours and is none."""
    names = {flag.variable.removeprefix(ENV_PREFIX) for flag in list_flags()}
    ours = (name.removeprefix(ENV_PREFIX) for name in sorted(environ) if name.startswith(ENV_PREFIX))
    guesses = ((name, _nearest(name, names, ENV_PREFIX)) for name in ours if name not in names)
    return [f"{ENV_PREFIX}{name} is no setting and does nothing{guess}" for name, guess in guesses if guess]


def _nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`; did you mean --port?`, or nothing."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.8)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def _check_together(settings: ServerSettings) -> None:
    """What one annotation cannot say."""
    scheme, separator, rest = settings.engine.model.model.partition("://")
    if separator and scheme != "hf":
        advice = f"write the path itself, /{rest.lstrip('/')}" if scheme == "file" else "write a path, or hf://org/name"
        raise BadSettingError(f"--model: {settings.engine.model.model[:200]!r}: no {scheme[:20]}:// here; {advice}")
    for origin in filter(None, map(str.strip, settings.http.cors_allow_origins.split(","))):
        if not ORIGIN.fullmatch(origin):
            raise BadSettingError(
                f"--cors-allow-origins: {origin[:100]!r} is no origin; write them as https://chat.example.org, or *"
            )
    if settings.http.otlp_endpoint is not None and not _has_good_port(settings.http.otlp_endpoint):
        raise BadSettingError(f"--otlp-endpoint: {settings.http.otlp_endpoint[:100]!r}: a port is 1..65535")
    block_size = settings.engine.cache.block_size
    if block_size & (block_size - 1):
        raise BadSettingError(f"--block-size: {block_size} is no power of two; use 8, 16, 32, 64, 128 or 256")
    scheduler = settings.engine.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise BadSettingError(
            f"--max-num-batched-tokens: {scheduler.max_num_batched_tokens} is less than --max-num-seqs"
            f" {scheduler.max_num_seqs}; every running request needs a token in each step"
        )
    if scheduler.speculative_max_ngram < scheduler.speculative_min_ngram:
        raise BadSettingError(
            f"--speculative-max-ngram: {scheduler.speculative_max_ngram} is less than --speculative-min-ngram"
            f" {scheduler.speculative_min_ngram}; raise the first or lower the second"
        )


def _has_good_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


class _Parser(argparse.ArgumentParser):
    """Tells a fault in one line instead of behind sixty flags."""

    def error(self, message: str) -> NoReturn:
        raise BadSettingError(f"{message}; --help lists all flags")


def _make_parser(flags: Sequence[Flag]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pagefleet-server",
        usage="pagefleet-server --model MODEL [flag ...]",
        description="Serves one model over the OpenAI API with paged attention.",
        epilog=f"Every flag has an environment variable: {ENV_PREFIX} and its name in capitals, with underscores.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("pagefleet"))
    for subject, some in groupby(flags, key=lambda flag: flag.subject):
        group = parser.add_argument_group(subject)
        for flag in some:
            default = "required" if flag.required else f"default: {_show(flag)}"
            text = f"{flag.help} [{default}; {flag.variable}]".replace("%", "%%")
            if flag.kind is bool:
                group.add_argument(flag.option, dest=flag.name, action="store_const", const="true", help=text)
                continue
            unit = "BYTES" if flag.is_size else "SECONDS" if flag.path[-1].endswith("_seconds") else flag.kind.__name__
            metavar = f"{{{','.join(flag.choices)}}}" if flag.choices else unit.upper()
            group.add_argument(flag.option, dest=flag.name, metavar=metavar, help=text)
    return parser


def _show(flag: Flag) -> str:
    if flag.is_size and isinstance(flag.default, int):
        return f"{flag.default // 1024**2}MiB"
    if flag.kind is bool:
        return "off"
    return "none" if flag.default is None else str(flag.default) or "empty"


def _parse_size(text: str, source: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in SIZE_UNITS:
        raise BadSettingError(f"{source}: {text[:100]!r} is no size; write bytes, or a number with KiB, MiB or GiB")
    return (
        int(float(match[1]) * SIZE_UNITS[match[2].lower()])
        if "." in match[1]
        else (int(match[1]) * SIZE_UNITS[match[2].lower()])
    )


def _parse_number(kind: type, text: str, source: str) -> int | float:
    pattern = r"[+-]?\d{1,18}" if kind is int else r"[+-]?\d{1,18}(\.\d{1,18})?"
    if not re.fullmatch(pattern, text.strip()):
        raise BadSettingError(f"{source}: {text[:100]!r} is no {'whole ' if kind is int else ''}number")
    return int(text) if kind is int else float(text)


def _unwrap(hint: object) -> tuple[type, tuple[object, ...]]:
    """`Annotated[int, Meta] | None` -> (int, (Meta,))."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return kind, tuple(notes)
    assert isinstance(hint, type)
    return hint, ()


def _field_docs(settings: type) -> dict[str, str]:
    """Field -> the docstring that follows it in the class body."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            docs[item.target.id] = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                docs[item.target.id] = " ".join(str(after.value.value).split())
    return docs
