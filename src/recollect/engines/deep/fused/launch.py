"""Launching the fused walk through CUDA's driver. Never run on a device yet.

A kernel is compiled at its first call on a device and kept for the process, so a call that is
captured as a graph needs one before it that is not.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from recollect.engines.deep.fused.compiling import compiled
from recollect.engines.deep.fused.fitting import Build

__all__ = ["DriverError", "launch"]

_SHARED_BYTES = 8
"""``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``."""

THREADS = 512


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
        raise DriverError(f"{name} failed ({code}: {why}) in the fused walk: use method='deep'")


@functools.cache
def _kernel(build: Build, device: int) -> ctypes.c_void_p:
    """The kernel's handle in the context of a device."""
    major, minor = torch.cuda.get_device_capability(device)
    macros = [f"-D{name}={value}" for name, value in build.macros().items()]
    code, _ = compiled("walk.cu", macros, f"sm_{major}{minor}")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), code)
    _call("cuModuleGetFunction", ctypes.byref(kernel), module, b"fused_walk")
    _call("cuFuncSetAttribute", kernel, _SHARED_BYTES, build.shared_bytes)
    return kernel


def launch(build: Build, task: ctypes.Structure, device: torch.device) -> None:
    """Enqueue a walk on the current stream of a device.

    Args:
        build: the kernel. task: its argument, copied at once. device: of all tensors.

    Raises:
        CompileError: no NVRTC, or a source that it refuses.
        DriverError: what the driver refuses.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        kernel = _kernel(build, torch.cuda.current_device())
        args = (ctypes.c_void_p * 1)(ctypes.addressof(task))
        grid, bytes_ = int(task.P) * build.CS, build.shared_bytes
        rest = (ctypes.c_void_p(stream), args, None)
        _call("cuLaunchKernel", kernel, grid, 1, 1, THREADS, 1, 1, bytes_, *rest)
