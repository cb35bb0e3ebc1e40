"""Finding, building and loading the CPU library: by CPU flags, once for many processes, with reasons when it cannot."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagefleet_kernels.cpu import build as build_module
from pagefleet_kernels.cpu import library as library_module
from pagefleet_kernels.cpu import prebuild
from pagefleet_kernels.cpu.build import Compiler, build, cache_dir, find_compiler, library_key, source_files
from pagefleet_kernels.cpu.isa import AVX2, AVX512_BF16, INSTRUCTION_SETS, cpu_flags, supported_sets
from pagefleet_kernels.cpu.library import LIBRARY_VARIABLE, find_library, load
from pagefleet_kernels.errors import BackendUnavailable
from support.cpu_kernels import LEVELS, library

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "fake c++ {version}"; exit 0; fi
echo run >> "{log}"
{action}
while [ "$#" -gt 1 ]; do if [ "$1" = "-o" ]; then echo built > "$2"; fi; shift; done
"""


def fake_compiler(folder: Path, *, version: str = "1.0", action: str = "") -> Compiler:
    """A compiler that writes a file and notes each run in compiler.log."""
    path = folder / "fake-cxx"
    path.write_text(FAKE_COMPILER.format(version=version, log=folder / "compiler.log", action=action))
    path.chmod(0o755)
    return find_compiler({"CXX": str(path), "PATH": os.environ["PATH"]})


def runs(folder: Path) -> int:
    log = folder / "compiler.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ("sse2", ()),
        ("avx2", ()),
        ("avx2 fma", ()),
        ("avx2 fma f16c popcnt", (AVX2,)),
        ("avx2 fma f16c popcnt avx512f avx512bw avx512dq avx512vl", (AVX2,)),
        ("avx2 fma f16c popcnt avx512f avx512bw avx512dq avx512vl avx512_bf16", (AVX512_BF16, AVX2)),
    ],
)
def test_a_cpu_gets_the_best_level_whose_flags_it_has(flags: str, want: tuple[object, ...]) -> None:
    assert supported_sets(flags.split()) == want


def test_flags_are_read_from_the_first_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: other\n")
    if cpu_flags():
        assert cpu_flags(info) == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "absent") == frozenset()
    info.write_text("Features\t: fp asimd\n")
    assert cpu_flags(info) == frozenset()


def test_no_level_compiles_for_the_machine_it_happens_to_run_on() -> None:
    for level in INSTRUCTION_SETS:
        assert not any("native" in flag for flag in (*level.compiler_flags, *build_module.BASE_FLAGS))


def test_a_library_is_built_once_and_again_only_for_another_key(tmp_path: Path) -> None:
    compiler, cache = fake_compiler(tmp_path), tmp_path / "cache"
    first = build(AVX2, compiler, cache)
    assert build(AVX2, compiler, cache) == first
    assert runs(tmp_path) == 1
    assert build(AVX512_BF16, compiler, cache) != first
    assert build(AVX2, fake_compiler(tmp_path, version="2.0"), cache) != first
    assert runs(tmp_path) == 3
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not list(cache.glob("*.tmp"))


def test_what_a_killed_build_left_goes_with_the_next(tmp_path: Path) -> None:
    compiler, cache = fake_compiler(tmp_path), tmp_path / "cache"
    library = build(AVX2, compiler, cache)
    library.with_suffix(".1234.tmp").write_bytes(b"half")
    (cache / "other.tmp").touch()
    assert build(AVX2, compiler, cache) == library and len(list(cache.glob("*.tmp"))) == 2
    library.unlink()
    build(AVX2, compiler, cache)
    assert [path.name for path in cache.glob("*.tmp")] == ["other.tmp"]


def test_the_key_covers_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler("c++", "1")
    for source in source_files():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build_module, "SOURCE_DIR", tmp_path)
    keys = {library_key(AVX2, compiler, ())}
    for source in source_files():
        source.write_text(source.read_text() + "// changed\n")
        keys.add(library_key(AVX2, compiler, ()))
    assert len(keys) == 1 + len(source_files())


def test_whoever_wants_it_at_the_same_time_it_is_built_once(tmp_path: Path) -> None:
    """The lock is on an open file: threads stand for processes here."""
    compiler = fake_compiler(tmp_path, action="sleep 0.2")
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build(AVX2, compiler, tmp_path / "cache"), range(4)))
    assert len(paths) == 1
    assert runs(tmp_path) == 1


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, action="echo 'fatal: out of luck' >&2; exit 1")
    with pytest.raises(BackendUnavailable, match=r"failed \(fake c\+\+ 1.0\): fatal: out of luck"):
        build(AVX2, compiler, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["build.lock"]


def test_sources_that_change_while_they_are_built_leave_no_library_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / build_module.MAIN_SOURCE).write_text("// before\n")
    monkeypatch.setattr(build_module, "SOURCE_DIR", sources)
    action = f"echo '// after' >> {sources / build_module.MAIN_SOURCE}"
    with pytest.raises(BackendUnavailable, match="changed while they were built"):
        build(AVX2, fake_compiler(tmp_path, action=action), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))
    build(AVX2, fake_compiler(tmp_path), tmp_path / "cache")


def test_without_a_compiler_the_reason_says_what_to_do() -> None:
    with pytest.raises(
        BackendUnavailable, match=r"no C\+\+ compiler \(g\+\+, clang\+\+\).*PAGEFLEET_KERNELS_CPU_LIBRARY"
    ):
        find_compiler({"PATH": "/nonexistent"})
    with pytest.raises(BackendUnavailable, match=r"no C\+\+ compiler \(/no/such/cxx\)"):
        find_compiler({"PATH": os.environ["PATH"], "CXX": "/no/such/cxx"})


def test_a_cache_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(BackendUnavailable, match="writable by nobody else"):
        build(AVX2, fake_compiler(tmp_path), cache)


def test_a_cache_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable, match="cannot build the CPU kernels in"):
        build(AVX2, fake_compiler(tmp_path), tmp_path / "file" / "cache")


def test_where_the_cache_lies(tmp_path: Path) -> None:
    assert cache_dir({"PAGEFLEET_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/pagefleet")
    assert cache_dir({"HOME": str(tmp_path)}) == tmp_path / ".cache/pagefleet"
    assert cache_dir({"HOME": "/nonexistent"}).name == f"pagefleet-{os.getuid()}"


def test_prebuilt_libraries_are_taken_by_level_and_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library(LEVELS[-1])

    def found(path: Path) -> Path:
        find_library.cache_clear()
        monkeypatch.setenv(LIBRARY_VARIABLE, str(path))
        try:
            return find_library().path
        finally:
            find_library.cache_clear()

    with pytest.raises(BackendUnavailable, match=r"holds none of .*kernels-avx2\.so"):
        found(tmp_path)
    copy = tmp_path / AVX2.library_name
    copy.write_bytes(built.path.read_bytes())
    assert found(tmp_path) == copy
    assert found(copy) == copy
    unnamed = tmp_path / "kernels.so"
    unnamed.write_bytes(b"")
    with pytest.raises(BackendUnavailable, match="name must say its instruction set"):
        found(unnamed)
    (tmp_path / "broken-avx2.so").write_bytes(b"not a library")
    with pytest.raises(BackendUnavailable, match="cannot load the CPU kernels"):
        found(tmp_path / "broken-avx2.so")
    with pytest.raises(BackendUnavailable, match="cannot load the CPU kernels"):
        found(tmp_path / "absent-avx2.so")


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = library(LEVELS[-1])
    monkeypatch.setattr(library_module, "source_key", lambda: "other")
    with pytest.raises(BackendUnavailable, match="other sources"):
        load(built.path, built.level)


def test_images_prebuild_every_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = fake_compiler(tmp_path)
    monkeypatch.setenv("CXX", compiler.path)
    assert prebuild.main(["--output", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        level.library_name for level in INSTRUCTION_SETS
    )
    assert "kernels-avx2.so" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "/no/such/cxx")
    assert prebuild.main(["--output", str(tmp_path / "out")]) == 1
    assert "no C++ compiler" in capsys.readouterr().err


def test_a_cpu_without_the_flags_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "cpu_flags", lambda: frozenset({"sse2"}))
    find_library.cache_clear()
    with pytest.raises(BackendUnavailable, match=r"none of the instruction sets .*\(avx512bf16 or avx2\)"):
        find_library()
    find_library.cache_clear()
