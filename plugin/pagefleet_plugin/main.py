"""The command line: `kubectl pagefleet top | explain | chat | bench`."""

import argparse
import asyncio
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pagefleet_plugin import top
from pagefleet_plugin.bench import Summary, bench
from pagefleet_plugin.chat import chat
from pagefleet_plugin.deployment import Deployment
from pagefleet_plugin.endpoint import open_endpoint
from pagefleet_plugin.errors import PluginError
from pagefleet_plugin.explain import explain
from pagefleet_plugin.kubectl import RESOURCE, Kubectl
from pagefleet_plugin.terminal import harmless

MIN_INTERVAL_SECONDS = 0.5


def main(argv: Sequence[str] | None = None) -> None:
    """Run it; exits 1 with one line on stderr when something fails, 130 on Ctrl-C."""
    arguments = parse_arguments(argv)
    try:
        asyncio.run(_run(arguments))
    except PluginError as error:
        print(f"error: {harmless(str(error))}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse; argparse exits with 2 and the reason when that fails."""
    parser = argparse.ArgumentParser(prog="kubectl pagefleet", description="A view of PageFleet's deployments.")
    parser.add_argument("--version", action="version", version=f"pagefleet {version('pagefleet')}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("-n", "--namespace", help="namespace (default: the context's)")
    shared.add_argument("--context", help="context of the kubeconfig")
    shared.add_argument("--kubeconfig", help="path of the kubeconfig")
    commands = parser.add_subparsers(dest="command", required=True)

    found = commands.add_parser("top", parents=[shared], help="live view of deployments and pods")
    found.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    found.add_argument("--once", action="store_true", help="print it once and end (so does a pipe)")
    found.add_argument(
        "--interval",
        type=_between(MIN_INTERVAL_SECONDS, 3600, " seconds"),
        default=2.0,
        metavar="SECONDS",
        help="default: 2; at least 0.5",
    )
    found.add_argument("-o", "--output", choices=("table", "json"), default="table")

    found = commands.add_parser("explain", parents=[shared], help="why it has this many replicas, in words")
    found.add_argument("name", type=_name, metavar="NAME")
    found.add_argument("--decisions", type=_positive, default=5, metavar="N", help="last changes shown (default: 5)")
    found.add_argument("-o", "--output", choices=("text", "json"), default="text")

    calls = argparse.ArgumentParser(add_help=False, parents=[shared])
    calls.add_argument("name", type=_name, metavar="NAME")
    calls.add_argument(
        "--url", type=_url, help="base URL of the API (default: the Service, by port-forward where needed)"
    )
    calls.add_argument("--max-tokens", type=_positive, metavar="N", help="longest answer (default: the server's)")

    found = commands.add_parser("chat", parents=[calls], help="talk to the model", epilog=_KEY_HELP)
    found.add_argument("--system", metavar="TEXT", help="system message")
    found.add_argument("--temperature", type=_between(0, 2), metavar="T", help="0 always takes the likeliest token")
    found.add_argument("question", nargs="?", help="ask this and end; without it, a conversation")

    found = commands.add_parser("bench", parents=[calls], help="a short load test", epilog=_KEY_HELP)
    found.add_argument("--requests", type=_positive, default=32, metavar="N", help="default: 32")
    found.add_argument("--concurrency", type=_positive, default=8, metavar="N", help="streams at once (default: 8)")
    found.add_argument("-o", "--output", choices=("table", "json"), default="table")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "chat" and arguments.question is None and len(rest) == 1 and not rest[0].startswith("-"):
        # argparse gives an optional argument its (empty) value before it has seen what follows an option.
        arguments.question, rest = rest[0], []
    if arguments.command == "chat" and arguments.question is not None and not arguments.question.strip():
        parser.error("QUESTION is empty; leave it out for a conversation")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


_KEY_HELP = "An API key is taken from the environment variable PAGEFLEET_API_KEY."


async def _run(arguments: argparse.Namespace) -> None:
    options = [
        f"--{name}={value}"
        for name in ("namespace", "context", "kubeconfig")
        if (value := getattr(arguments, name)) is not None
    ]
    kubectl = Kubectl.find(options)
    if arguments.command == "top":
        await _top(kubectl, arguments)
    elif arguments.command == "explain":
        await _explain(kubectl, arguments)
    elif arguments.command == "chat":
        await _chat(kubectl, arguments)
    else:
        await _bench(kubectl, arguments)


async def _top(kubectl: Kubectl, arguments: argparse.Namespace) -> None:
    scope = ["--all-namespaces"] if arguments.all_namespaces else []

    async def read() -> list[Deployment]:
        items = (await kubectl.get_json(RESOURCE, *scope)).get("items") or []
        return [Deployment.read(item) for item in items]

    if arguments.output == "json":
        print(json.dumps(top.document(await read()), indent=2))
        return
    console = Console()
    if arguments.once or not console.is_terminal:
        # Wide enough for every column: a pipe has no width of its own.
        Console(width=max(console.width, 160)).print(_view(await read()))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = _view(await read())
            except PluginError as error:
                # A cluster that is away for a moment does not end the view.
                shown = Group(Text(f"{datetime.now():%H:%M:%S}  {error}", style="red"))
            live.update(shown, refresh=True)
            await asyncio.sleep(arguments.interval)


def _view(deployments: Sequence[Deployment]) -> Group:
    if not deployments:
        return Group(Text("No LLMDeployment here. Other namespaces: -A"))
    clock = f"{datetime.now():%H:%M:%S}  █ used  ▒ cached, free to take  · free"
    return Group(Text(clock, style="dim"), top.table(deployments))


async def _explain(kubectl: Kubectl, arguments: argparse.Namespace) -> None:
    found = Deployment.read(await kubectl.get_json(RESOURCE, arguments.name))
    lines = explain(found, now=datetime.now(UTC), decisions=arguments.decisions)
    if arguments.output == "json":
        print(json.dumps({"lines": lines, **asdict(found)}, indent=2, default=str))
    else:
        print("\n".join(lines))


async def _chat(kubectl: Kubectl, arguments: argparse.Namespace) -> None:
    extra = _extra(arguments, temperature=arguments.temperature)
    async with open_endpoint(kubectl, arguments.name, url=arguments.url) as url:
        await chat(
            url, headers=_headers(), extra=extra, first=arguments.question, system=arguments.system, read=_read_line
        )


async def _bench(kubectl: Kubectl, arguments: argparse.Namespace) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with open_endpoint(kubectl, arguments.name, url=arguments.url) as url:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("requests", total=arguments.requests)
            summary = await bench(
                url,
                requests=arguments.requests,
                concurrency=arguments.concurrency,
                max_tokens=arguments.max_tokens or 128,
                headers=_headers(),
                extra={},
                done=lambda: progress.advance(task),
            )
    if arguments.output == "json":
        print(json.dumps(asdict(summary), indent=2))
    else:
        Console().print(_bench_table(summary))
    if summary.failed:
        raise PluginError(f"{summary.failed} of {summary.requests} requests failed: {'; '.join(summary.errors)}")


def _bench_table(summary: Summary) -> Table:
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_row("requests", f"{summary.requests} in {summary.seconds:.1f} s, {summary.failed} failed")
    made.add_row("output tokens/s", f"{summary.tokens_per_second:.1f}")
    for title, found in (("TTFT", summary.first_token_ms), ("ITL", summary.inter_token_ms)):
        made.add_row(title, "  ".join(f"{name} {value:.1f} ms" for name, value in found.items()) or top.UNKNOWN)
    return made


def _extra(arguments: argparse.Namespace, **fields: object) -> dict[str, Any]:
    return {name: value for name, value in {"max_tokens": arguments.max_tokens, **fields}.items() if value is not None}


def _headers() -> dict[str, str]:
    key = os.environ.get("PAGEFLEET_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is no name of an object: small letters, digits, '-' and '.'")
    return text


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is no base URL; write it as http://127.0.0.1:8000")
    return text


def _between(low: float, high: float, unit: str = "") -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:100]!r} is not between {low:g} and {high:g}{unit}")
        return value

    return parse


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) <= 9 else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value
