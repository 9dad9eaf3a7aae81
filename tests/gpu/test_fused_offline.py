"""The fused walk compiled for devices that are not there: registers, spills, memory, instructions.

By NVRTC where it is installed, as a user's machine would, or else by nvcc.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import recollect as rc
from recollect.engines import deep
from recollect.engines.deep.fused.compiling import SOURCES, CompileError, compiled, find_nvrtc
from recollect.engines.deep.fused.fitting import BLOCKS, CURVES, MOST_SHARED, Build, runs_on
from recollect.engines.deep.fused.launch import FILES, threads_of
from recollect.functional.binding import bind


def build(
    D: int = 64, b: int = 16, expansion: int = 4, *, momentum: bool = True, share: bool = True
) -> Build | None:
    kind = rc.algorithm.Momentum if momentum else rc.algorithm.GradientDescent
    recipe = rc.Recipe(
        memory=rc.memory.MLP(expansion=expansion),
        retention=rc.retention.Decay(),
        algorithm=kind(batch_size=b, normalized_steps=share),
    )
    return deep.fused_plan(bind(recipe, H=1, K=D, V=D)).fused


def report(kernel: str, one: Build, arch: str, folder: Path) -> str:
    """What the assembler says of a kernel."""
    macros = [f"-D{name}={value}" for name, value in one.macros(kernel).items()]
    arch += "a" if one.warpgroups and arch == "sm_90" else ""
    source, _ = FILES[kernel]
    if find_nvrtc() is not None:
        return compiled(source, macros, arch, log=True)[1]
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("neither NVRTC nor nvcc to compile CUDA with")
    options = [f"-arch={arch}", "-std=c++17", "-cubin", "-Xptxas", "-v", f"-I{SOURCES}", *macros]
    command = [nvcc, *options, str(SOURCES / source), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def held_to_the_gate(kernel: str, one: Build, arch: str, folder: Path) -> None:
    said = report(kernel, one, arch, folder)
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    spilt = [int(x) for x in re.findall(r"(\d+) bytes spill", said)]
    # A block has an SM's 65,536 registers to itself: 512 threads that read, or 288 (384), or 256.
    # Two blocks of tokens share them, and the shared memory that one of the others may have.
    assert registers <= (128 if kernel in ("walk", "token") else 255), said
    assert spilt == [0, 0], (kernel, one, said)
    assert "serialized" not in said, said  # products of warpgroups, which then wait for each other
    assert max(one.shared_bytes, one.back_bytes, 2 * one.token_bytes) <= MOST_SHARED


def test_titans_compiles_without_spills(tmp_path: Path) -> None:
    one = build()
    assert one is not None and (one.CS, one.HS) == (4, 64)
    held_to_the_gate("walk", one, "sm_90", tmp_path)
    held_to_the_gate("token", one, "sm_90", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["trace", "back"])
def test_training_compiles_without_spills(kernel: str, tmp_path: Path) -> None:
    one = build()
    assert one is not None
    held_to_the_gate(kernel, one, "sm_90", tmp_path)


SIZES = [
    (D, b, expansion, momentum, share)
    for D in (64, 128)
    for b in (16, 32, 64)
    for expansion in (1, 2, 3, 4)
    for momentum in (True, False)
    for share in (True, False)
]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["walk", "trace", "back", "token"])
def test_all_sizes_compile_without_spills(kernel: str, tmp_path: Path) -> None:
    """All that are offered, for 9.0, ×4 for 10.0, and for 8.0 those that live in one block."""
    count = 0
    for D, b, expansion, momentum, share in SIZES:
        one = build(D, b, expansion, momentum=momentum, share=share)
        assert one is not None and one.CS <= BLOCKS
        count += 1
        held_to_the_gate(kernel, one, "sm_90", tmp_path)
        if expansion == 4 and runs_on(one, (10, 0)):
            held_to_the_gate(kernel, one, "sm_100", tmp_path)
        if runs_on(one, (8, 0)):
            assert one.CS == 1
            held_to_the_gate(kernel, one, "sm_80", tmp_path)
    assert count == len(SIZES) == 96


@pytest.mark.slow
def test_a_batch_of_64_compiles_without_spills(tmp_path: Path) -> None:
    for curve in CURVES:
        one = build(b=64)
        assert one is not None and (one.CS, one.HS) == (4, 64)
        one = dataclasses.replace(one, curve=CURVES.index(curve), residual=False)
        for kernel in FILES:
            held_to_the_gate(kernel, one, "sm_90", tmp_path)


def ptx(kernel: str, one: Build, folder: Path) -> str:
    """The kernel's PTX, by nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc to compile CUDA with")
    macros = [f"-D{name}={value}" for name, value in one.macros(kernel).items()]
    target = folder / "kernel.ptx"
    source, _ = FILES[kernel]
    options = [f"-arch={one.arch((9, 0))}", "-std=c++17", "-ptx", f"-I{SOURCES}", *macros]
    subprocess.run([nvcc, *options, str(SOURCES / source), "-o", str(target)], check=True)
    return target.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("b", [16, 64])
def test_products_are_tensor_instructions(b: int, tmp_path: Path) -> None:
    """Per warp, or per warpgroup: z, p, u, the state (keys); scores, reads (queries)."""
    one = build(b=b)
    assert one is not None
    text = ptx("walk", one, tmp_path)
    keys, queries = 4 + 4 + 4 + 2 * 2 * 4, 2 * 8 + 2 * (2 * 4 + 1)
    if b == 64:
        queries = 2 * 4 + 2 * (2 * 4 + 4)
    assert text.count("mma.sync.aligned.m16n8k16") == (keys + queries if b == 16 else 0)
    assert text.count("wgmma.mma_async.sync.aligned.m64n") == (keys + queries if b == 64 else 0)
    assert "ld.local" not in text and "st.local" not in text


@pytest.mark.slow
@pytest.mark.parametrize("b", [16, 64])
def test_blocks_have_the_threads_that_their_kernels_count(b: int, tmp_path: Path) -> None:
    one = build(b=b)
    assert one is not None
    for kernel in FILES:
        found = re.search(r"\.maxntid (\d+)", ptx(kernel, one, tmp_path))
        assert found is not None and int(found[1]) == threads_of(kernel, one)


@pytest.mark.slow
def test_a_token_reads_the_state_once_and_in_whole_pieces(tmp_path: Path) -> None:
    """Of A and S 64 numbers a thread: 16 loads of 16 bytes, which nothing loads again."""
    one = build()
    assert one is not None
    text = ptx("token", one, tmp_path)
    assert text.count("ld.global.v4.f32") == 16
    assert "ld.local" not in text and "st.local" not in text


def test_the_host_counts_what_the_kernel_does(tmp_path: Path) -> None:
    """The kernel refuses to compile where the host's count of shared memory is not its own."""
    one = build()
    assert one is not None
    wrong = one.macros() | {"SHARED_BYTES": str(one.shared_bytes + 16)}
    if find_nvrtc() is None:
        pytest.skip("no NVRTC: nvcc's and g++'s refusals are the same line")
    with pytest.raises(CompileError, match="the host counts otherwise"):
        compiled("walk.cu", [f"-D{name}={value}" for name, value in wrong.items()], "sm_90")


def test_devices_hold_what_fits() -> None:
    one = build()
    assert one is not None
    assert runs_on(one, (9, 0)) and runs_on(one, (10, 0))
    assert not runs_on(one, (8, 0)) and not runs_on(one, (12, 0))
    small = dataclasses.replace(one, CS=1)
    assert runs_on(small, (8, 0)) and not runs_on(small, (8, 6))
    long = build(b=64)
    assert long is not None
    assert runs_on(long, (9, 0)) and long.arch((9, 0)) == "sm_90a" and one.arch((9, 0)) == "sm_90"
    assert not any(runs_on(long, other) for other in ((8, 0), (10, 0), (12, 0)))
