"""Launching the fused walk through CUDA's driver.

A kernel is compiled at its first call on a device and kept for the process, so a call that is
captured as a graph needs one before it that is not.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from recollect.engines.deep.fused.compiling import compiled
from recollect.engines.deep.fused.fitting import Build

__all__ = ["DriverError", "launch", "threads_of"]

_SHARED_BYTES = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``."""

_LARGE_CLUSTERS = 14
"""``CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED``."""

PORTABLE = 8
"""Blocks of a cluster beyond which a kernel has to allow it."""

THREADS = {"walk": 512, "trace": 288, "back": 256, "token": 256}
"""Of a block, as the kernels' own counts; see `threads_of`."""

FILES = {
    "walk": ("walk.cu", b"fused_walk"),
    "trace": ("walk.cu", b"fused_walk"),
    "back": ("back.cu", b"fused_walk_back"),
    "token": ("decode.cu", b"fused_walk_token"),
}
"""Of each kernel its source, and what it is called there."""


class DriverError(RuntimeError):
    """The driver has refused a call; says which and why."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: object) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        why = (text.value or b"unknown").decode()
        raise DriverError(f"{name} failed ({code}: {why}) in the fused walk: use engine='deep'")


@functools.cache
def _kernel(name: str, build: Build, device: int) -> ctypes.c_void_p:
    """The kernel's handle in the context of a device."""
    arch = build.arch(torch.cuda.get_device_capability(device))
    macros = [f"-D{key}={value}" for key, value in build.macros(name).items()]
    file, entry = FILES[name]
    code, _ = compiled(file, macros, arch)
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), code)
    _call("cuModuleGetFunction", ctypes.byref(kernel), module, entry)
    _call("cuFuncSetAttribute", kernel, _SHARED_BYTES, _bytes(name, build))
    if build.CS > PORTABLE:
        _call("cuFuncSetAttribute", kernel, _LARGE_CLUSTERS, 1)
    return kernel


def threads_of(name: str, build: Build) -> int:
    """Threads of a block; a trace by warpgroups has three groups.

    Args:
        name: of `FILES`.
        build: of the kernel.
    """
    return 384 if name == "trace" and build.warpgroups else THREADS[name]


def _bytes(name: str, build: Build) -> int:
    others = {"back": build.back_bytes, "token": build.token_bytes}
    return others.get(name, build.shared_bytes)


def launch(name: str, build: Build, task: ctypes.Structure, device: torch.device) -> None:
    """Enqueue a kernel on the current stream of a device.

    Args:
        name: of `FILES`.
        build: of the kernel. task: its argument, copied at once. device: of all tensors.

    Raises:
        CompileError: no NVRTC, or a source that it refuses.
        DriverError: what the driver refuses.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        kernel = _kernel(name, build, torch.cuda.current_device())
        args = (ctypes.c_void_p * 1)(ctypes.addressof(task))
        grid, threads = int(task.P) * build.CS, threads_of(name, build)
        rest = (_bytes(name, build), ctypes.c_void_p(stream), args, None)
        _call("cuLaunchKernel", kernel, grid, 1, 1, threads, 1, 1, *rest)
