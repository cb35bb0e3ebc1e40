"""The servers: how each is started, and how it wants to be asked."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.paths import Paths, quantised_gguf
from benchmarks.serving.setup import VERSIONS
from benchmarks.serving.workloads import Request

SERVED_NAME = "m"
KV_MEMORY = "512MiB"


@dataclass(frozen=True, slots=True)
class Peer:
    """One server in one setting."""

    name: str
    command: tuple[str, ...]
    """Without the port."""
    port_flag: str = "--port"
    env: dict[str, str] = field(default_factory=dict)
    takes_ignore_eos: bool = True
    model: str = SERVED_NAME
    """As requests name it."""
    in_process: bool = False
    """Not a server but a program that takes workloads on its standard input."""
    workloads: str = "ABCDE"
    """Those that it is asked to do."""
    installed: bool = True
    version: str = ""
    """As installed by setup.py; "" for ours, whose commit is in the record."""

    @property
    def is_ours(self) -> bool:
        """Ours, in whatever setting."""
        return "pagefleet_server.main" in self.command

    def body(self, request: Request) -> dict[str, object]:
        """The streaming completion it is asked for."""
        body: dict[str, object] = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.num_output,
            "temperature": 0,
            "stream": True,
        }
        if self.takes_ignore_eos:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return body


def ours(name: str = "ours", flags: tuple[str, ...] = (), model: Path | None = None) -> Peer:
    """Our server on the .gguf file, whose weights it holds in bfloat16, or on another model."""
    command = (sys.executable, "-m", "pagefleet_server.main", "--model", str(model or quantised_gguf()))
    common = ("--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--kv-cache-memory", KV_MEMORY)
    threads = ("--threads", str(len(os.sched_getaffinity(0))), "--drain-delay", "0")
    return Peer(name, command + common + threads + flags)


def vllm(paths: Paths, model: Path, dtype: str = "bfloat16") -> Peer:
    """vLLM with all cores for its threads (its default keeps one of two for itself) and the libraries it asks for."""
    folder = paths.folder
    preload = [*folder.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"), *folder.glob("vllm/lib/libiomp5.so")]
    command = (str(paths.program("vllm", "vllm")), "serve", str(model), "--served-model-name", SERVED_NAME)
    env = {
        "LD_PRELOAD": ":".join(map(str, preload)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{paths.folder / 'vllm' / 'bin'}:{os.environ['PATH']}",
    }
    flags = ("--dtype", dtype, "--max-model-len", "4096")
    return Peer(
        "vllm",
        command + flags,
        env=env,
        installed=paths.program("vllm", "vllm").exists(),
        version=VERSIONS["vllm"],
    )


def llama(paths: Paths, name: str, model: Path) -> Peer:
    """llama.cpp's server with 16 slots of 2,048 tokens."""
    program = paths.llama_build / "bin" / "llama-server"
    threads = str(len(os.sched_getaffinity(0)))
    flags = ("-a", SERVED_NAME, "-t", threads, "-tb", threads, "-np", "16", "-c", "32768", "-cb")
    command = (str(program), "-m", str(model), *flags)
    return Peer(
        name, command, workloads="ABCD", installed=program.exists() and model.exists(), version=VERSIONS["llama"]
    )


def transformers_serve(paths: Paths) -> Peer:
    """transformers' own server with continuous batching; it knows no ignore_eos, so its model has no end.

    A and D only: it takes two minutes for a round of B, and more than a quarter of an hour for one of C."""
    program = paths.program("transformers", "transformers")
    flags = ("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16", "--attn-implementation", "sdpa")
    sizes = ("--cb-block-size", "32", "--cb-num-blocks", "1024", "--cb-max-batch-tokens", "1024")
    command = (str(program), "serve", str(paths.endless_model), *flags, *sizes)
    model = str(paths.endless_model)
    return Peer(
        "transformers",
        command,
        model=model,
        takes_ignore_eos=False,
        workloads="AD",
        installed=program.exists(),
        version=VERSIONS["transformers"],
    )


def openvino(paths: Paths) -> Peer:
    """OpenVINO GenAI on the quantised file, in-process: no HTTP, and no client on its cores. A mark for kernels."""
    python = paths.python("openvino")
    driver = str(Path(__file__).with_name("openvino_driver.py"))
    command = (str(python), driver, str(quantised_gguf()), str(len(os.sched_getaffinity(0))))
    version = VERSIONS["openvino"]
    return Peer("openvino-q4", command, in_process=True, workloads="ABCD", installed=python.exists(), version=version)


def known_peers(paths: Paths, size: str = "135m") -> dict[str, Callable[[], Peer]]:
    """Name -> its making. Of size 1b there are only those that read a Hugging Face directory, and need no end."""
    if size == "1b":
        return {"ours": lambda: ours(model=paths.random_1b), "vllm": lambda: vllm(paths, paths.random_1b)}
    return {
        "ours": ours,
        "vllm": lambda: vllm(paths, paths.model),
        "llama-bf16": lambda: llama(paths, "llama-bf16", paths.bf16_gguf),
        "llama-q4": lambda: llama(paths, "llama-q4", quantised_gguf()),
        "transformers": lambda: transformers_serve(paths),
        "openvino-q4": lambda: openvino(paths),
    }
