"""Broken checkpoints: refused within seconds, with the file and the numbers, whatever is broken."""

import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagefleet_kernels.dispatch import select_backend
from pagefleet_server import host_memory
from pagefleet_server.gguf_metadata import read_gguf_metadata
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.checkpoint import open_checkpoint
from pagefleet_server.models.config_sizes import LARGEST
from pagefleet_server.models.executor import open_model
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.models.loading import load_model
from pagefleet_server.models.safetensors_table import read_tensor_table
from pagefleet_server.settings import ModelSettings
from pagefleet_server.tokenizer import load_tokenizer
from support.api_server import running
from support.gguf_bytes import byte_level_tokenizer, gguf, text
from support.gguf_llama_file import tiny_llama_gguf
from support.tiny_models import write_tiny_llama

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def load(path: Path) -> None:
    load_model(ModelSettings(model=str(path), device="cpu", dtype="float32"))


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def change_header(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> Path:
    data = (path / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])
    return path


def change_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shard(path: Path, *, lost: str | None = None, renamed: str | None = None) -> Path:
    """One file with an index; `lost` is in the index only, `renamed` is the name that the index gives the file."""
    names = list(load_file(path / WEIGHTS))
    if lost is not None:
        change_tensors(path, lambda tensors: tensors.pop(lost))
    index = {"weight_map": dict.fromkeys(names, renamed or WEIGHTS)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (lambda p: change_tensors(p, lambda t: t.pop(UP)), f"no weights for {UP}"),
    "many tensors are missing": (
        lambda p: change_tensors(p, lambda t: [t.pop(name) for name in list(t) if "mlp" in name]),
        "and 3 more",
    ),
    "a tensor of another size": (
        lambda p: change_tensors(p, lambda t: t.update({UP: torch.zeros(3, 4)})),
        r"has shape \[3, 4\], by the configuration it has \[96, 48\]",
    ),
    "another model's configuration": (
        lambda p: change_config(p, hidden_size=64, num_attention_heads=8),
        "by the configuration it has",
    ),
    "scales that nobody uses": (
        lambda p: change_tensors(p, lambda t: t.update({f"{UP}_scale": torch.ones(1)})),
        f"holds {UP}_scale and 0 more numbers of quantised weights",
    ),
    "quantised in a way that nobody knows": (
        lambda p: change_config(p, quantization_config={"quant_method": "martian", "bits": 3}),
        "quantised by 'martian'; transformers .* knows .*gptq",
    ),
    "quantised in a way whose package is not there": (
        lambda p: change_config(p, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
        "GPTQ quantized model requires",
    ),
    "a quantisation that is none": (lambda p: change_config(p, quantization_config={"bits": 4}), "quantised by 'None'"),
    "a shard without a tensor of the index": (lambda p: shard(p, lost=UP), f"holds no tensor {UP}"),
    "a shard that is not there": (lambda p: shard(p, renamed="model-00002-of-00002.safetensors"), "00002-of-00002"),
    "an index that leads elsewhere": (lambda p: shard(p, renamed="../../secret"), "no file beside it"),
    "a shape that its bytes do not fill": (
        lambda p: change_header(p, lambda h: h[UP].update(shape=[96, 49])),
        r"\[96, 49\] in F32 takes 18816 bytes, but 18432",
    ),
    "a tensor beyond the end": (
        lambda p: change_header(p, lambda h: h[UP].update(data_offsets=[2**40, 2**40 + 18432])),
        "truncated",
    ),
    "a place that runs backwards": (
        lambda p: change_header(p, lambda h: h[UP].update(data_offsets=[100, 50])),
        "header is damaged",
    ),
    "a rotary embedding that nobody knows": (
        lambda p: change_config(p, rope_parameters={"rope_type": "martian", "rope_theta": 1e4}),
        "rope_type 'martian'; transformers .* knows .*yarn",
    ),
    "fewer layers than there are": (
        lambda p: change_config(p, num_hidden_layers=1),
        r"holds model\.layers\.1\..*, but its configuration has 1 layers",
    ),
    **{
        f"{key} {value!r}": (
            lambda p, key=key, value=value: change_config(p, **{key: value}),  # type: ignore[misc]
            rf"config.json: {key} is .*; it must be a whole number from 1 to {largest}",
        )
        for key, largest in LARGEST.items()
        for value in (0, -1, largest + 1, "48", 4.5, True)
    },
    "an architecture that does not exist": (
        lambda p: (p / "config.json").write_text('{"model_type": "martian", "architectures": ["MartianForCausalLM"]}'),
        "martian",
    ),
    "a configuration without architecture": (
        lambda p: (p / "config.json").write_text('{"hidden_size": 48, "vocab_size": 320}'),
        "not understood",
    ),
    "a configuration of wrong types": (
        lambda p: (p / "config.json").write_text('{"model_type": "llama", "rope_parameters": "many"}'),
        "not understood",
    ),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_checkpoint_is_refused_by_name(tmp_path: Path, name: str) -> None:
    break_it, want = BROKEN[name]
    path = write_tiny_llama(tmp_path)
    break_it(path)
    with pytest.raises(ModelError, match=want) as error:
        load(path)
    assert str(path) in str(error.value)


def test_layers_that_are_left_out_are_served_only_to_who_insists(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    change_config(path, num_hidden_layers=1)
    settings = ModelSettings(model=str(path), device="cpu", dtype="float32", trust_unverified_model=True)
    assert len(load_model(settings).layers) == 1


def test_a_context_whose_rotary_tables_do_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, max_positions=LARGEST["max_position_embeddings"])
    decoder = open_model(ModelSettings(model=str(path), device="cpu")).load(
        select_backend(torch.device("cpu"), "reference")
    )[0]
    assert isinstance(decoder, FusedDecoder)
    decoder.num_positions = 10**12
    with pytest.raises(
        ModelError, match=r"of 1000000000000 positions take 32000000000000 bytes.*lower --max-model-len"
    ):
        decoder.table(decoder.spec.layers[0].rope)


@pytest.mark.parametrize("executor", ["fused", "transformers"])
@pytest.mark.parametrize("kind", ["directory", "gguf", "dummy"])
def test_model_larger_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, executor: str
) -> None:
    module: torch.nn.Module
    if kind == "gguf":
        path, module = tiny_llama_gguf(tmp_path / "m.gguf", tied=True)
    else:
        path = write_tiny_llama(tmp_path)
        module = load_model(ModelSettings(model=str(path), device="cpu", dtype="float32")).module
    needed = sum(parameter.nbytes for parameter in module.parameters())
    held = 2**30
    settings = ModelSettings(
        model=str(path),
        device="cpu",
        dtype="float32",
        load_format="dummy" if kind == "dummy" else "auto",
        executor=executor,
    )
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: held)
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: held + needed - 1)
    with pytest.raises(ModelError, match=f"take {needed} bytes in float32.* is {held + needed - 1} ") as error:
        open_model(settings)
    assert str(path) in str(error.value)
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: held + needed)
    open_model(settings)


def damages(data: bytes, rng: random.Random, count: int, *, within: int) -> list[bytes]:
    """Flipped bytes, cut and doubled pieces, and numbers that are absurd, in the first `within` bytes."""
    found = []
    for _ in range(count):
        new = bytearray(data)
        at = rng.randrange(within)
        kind = rng.randrange(4)
        if kind == 0:
            for _ in range(rng.randrange(1, 4)):
                new[rng.randrange(within)] = rng.randrange(256)
        elif kind == 1:
            del new[at : at + rng.randrange(1, 64)]
        elif kind == 2:
            new[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            new[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
        found.append(bytes(new))
    return found


def test_no_damage_of_a_gguf_file_raises_anything_but_a_model_error(tmp_path: Path) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=True, kind="Q4_0")
    whole = path.read_bytes()
    hand_made = gguf([*byte_level_tokenizer(bos=True), ("k", 8, text("v"))], tensors=[("w", (8, 8), 0)])
    num_refused = 0
    for data, within in ((whole, 2048), (hand_made, len(hand_made))):
        for damaged in damages(data, random.Random(1), 150, within=within):
            path.write_bytes(damaged)
            try:
                read_gguf_metadata(path)
            except ModelError as error:
                num_refused += 1
                assert str(path) in str(error)
    assert num_refused > 60


def test_damaged_gguf_is_refused_by_the_loader_or_loads(tmp_path: Path) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=True, kind="Q4_0")
    for damaged in damages(path.read_bytes(), random.Random(2), 25, within=2048):
        path.write_bytes(damaged)
        try:
            load(path)
        except ModelError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("tensors", "kind", "want"),
    [
        ([("w", (32,), 0)], 99, "tensor w has ggml type 99"),
        ([("w", (33,), 0)], 2, r"shape \[33\] is not made of blocks of 32"),
        ([("w", (), 0)], 0, "not made of blocks"),
        ([("w", (32, 0), 0)], 0, "not made of blocks"),
        ([("w", (2**62, 2**62), 0)], 0, "truncated"),
        ([("w", (32,), 2**63)], 0, "truncated"),
    ],
)
def test_gguf_tensor_that_cannot_be_is_refused(
    tmp_path: Path, tensors: list[tuple[str, tuple[int, ...], int]], kind: int, want: str
) -> None:
    (name, dims, offset) = tensors[0]
    table = text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table + b"\0" * 256)
    with pytest.raises(ModelError, match=want):
        read_gguf_metadata(path)


def test_no_damage_of_a_safetensors_header_raises_anything_but_a_model_error(tmp_path: Path) -> None:
    file = write_tiny_llama(tmp_path) / WEIGHTS
    whole = file.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    num_refused = 0
    for damaged in damages(whole, random.Random(3), 100, within=length):
        file.write_bytes(damaged)
        try:
            read_tensor_table(file)
        except ModelError as error:
            num_refused += 1
            assert str(file) in str(error)
    assert num_refused > 50


@pytest.mark.parametrize("header", [b"[]", b"null", b"{" * 5000, b'{"a": 1}', b'{"a": {"data_offsets": [0]}}'])
def test_safetensors_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    file = write_tiny_llama(tmp_path) / WEIGHTS
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match="header is damaged"):
        open_checkpoint(str(tmp_path))


def test_server_ends_with_code_3_and_says_file_and_numbers_last(tmp_path: Path) -> None:
    """Kubernetes shows the end of the log as the termination message."""
    path = write_tiny_llama(tmp_path / "model")
    weights = path / WEIGHTS
    whole = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-100])
    command = [sys.executable, "-m", "pagefleet_server.main", "--model", str(path), "--port", "0", "--threads", "1"]
    with running(command, tmp_path / "server.log", {"OMP_NUM_THREADS": "1"}) as server:
        assert server.process.wait(60) == 3
        last_words = server.log[-2048:]
    assert f"{weights}: is truncated: {whole - 100} bytes, {whole} needed" in last_words


@pytest.mark.parametrize("name", ["model.gguf", "model/model.safetensors"])
def test_a_pointer_of_git_lfs_is_told_as_one(tmp_path: Path, name: str) -> None:
    write_tiny_llama(tmp_path / "model")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    path = tmp_path / name if name.endswith(".gguf") else tmp_path / "model"
    with pytest.raises(ModelError, match=f"{name}: is a pointer of Git LFS.*git lfs pull"):
        open_checkpoint(str(path))


def test_a_directory_around_a_gguf_file_is_refused_with_the_file(tmp_path: Path) -> None:
    """By both processes: whoever is first is heard."""
    (tmp_path / "some-q4.gguf").touch()
    for look in (lambda: open_checkpoint(str(tmp_path)), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(ModelError, match=rf"holds no config.json; did you mean {tmp_path / 'some-q4.gguf'}\?"):
            look()
