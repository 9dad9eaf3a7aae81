"""CUDA C++ to machine code by NVRTC, the compiler that every CUDA build of torch brings along.

No header of CUDA's and no toolkit is needed: the sources are this package's own, and hand the
compiler what they include.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

__all__ = ["SOURCES", "CompileError", "compiled", "find_nvrtc", "source"]

SOURCES = Path(__file__).parent / "cuda"
"""Where the kernels are."""

_VERSIONS = (13, 12)


class CompileError(RuntimeError):
    """NVRTC is missing, or has refused a source; says which."""


def source(name: str) -> str:
    """The text of a source.

    Args:
        name: of a file of `SOURCES`.
    """
    return (SOURCES / name).read_text(encoding="utf-8")


def _places() -> Iterator[str]:
    # That of torch's own CUDA first: a driver of 12 does not load what a compiler of 13 has made.
    own = int((torch.version.cuda or "0").partition(".")[0])
    versions = sorted(_VERSIONS, key=lambda version: version != own)
    for version in versions:
        yield f"libnvrtc.so.{version}"
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for version in versions:
            for path in sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{version}")):
                yield str(path)


def find_nvrtc() -> ctypes.CDLL | None:
    """NVRTC, from the system's libraries or from where torch's wheels put it; else ``None``."""
    for place in _places():
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def compiled(
    name: str, macros: Sequence[str], arch: str, *, log: bool = False
) -> tuple[bytes, str]:
    """Machine code of a source, and what the compiler had to say.

    Args:
        name: of a file of `SOURCES`.
        macros: as ``-DNAME=VALUE``.
        arch: e.g. ``"sm_90"``.
        log: whether registers, spills and shared memory are reported.

    Raises:
        CompileError: no NVRTC, or a refusal, with its log.
    """
    lib = find_nvrtc()
    if lib is None:
        raise CompileError(
            "engine='fused' compiles its kernel by NVRTC, and no libnvrtc.so was found: use a CUDA "
            "build of torch, or engine='deep'"
        )
    headers = [path.name for path in sorted(SOURCES.glob("*.cuh"))]
    texts = [source(header) for header in headers]
    strings = ctypes.c_char_p * len(headers)
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(
        ctypes.byref(program),
        source(name).encode(),
        name.encode(),
        len(headers),
        strings(*(text.encode() for text in texts)),
        strings(*(header.encode() for header in headers)),
    )
    options = [f"--gpu-architecture={arch}", "--std=c++17", *macros]
    options += ["--ptxas-options=-v"] if log else []
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        failed = lib.nvrtcCompileProgram(program, len(options), given)
        said = _text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program).decode()
        if failed:
            raise CompileError(f"NVRTC refused {name} for {arch}: {said.strip()}")
        return _text(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program), said
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size: ctypes._CFuncPtr, get: ctypes._CFuncPtr, program: ctypes.c_void_p) -> bytes:  # pyright: ignore[reportAttributeAccessIssue]
    count = ctypes.c_size_t()
    size(program, ctypes.byref(count))
    buffer = ctypes.create_string_buffer(count.value)
    get(program, buffer)
    return buffer.raw.rstrip(b"\0") if get.__name__.endswith("Log") else buffer.raw
