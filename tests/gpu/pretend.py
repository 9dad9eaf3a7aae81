"""A device that pretends to be a GPU: the CPU's numbers, with counts of a GPU's work.

Tensors on it report a separate device type, so code takes its path for devices, and hold a CPU
tensor that does the arithmetic. Counted are

* launches: operations that read or write memory (views do not);
* syncs: waits of the host for a value of the device (``.item()``, ``torch.equal``, a boolean
  index, a shape that depends on values);
* copies: data from the host to the device (``torch.tensor(..., device=)``, ``.to(device)``);
* mixed: operations between a device's tensor and a CPU's, which a GPU refuses.

Each sync, copy and mixed operation is stored with the line of the library that caused it.

`record` acts like a CUDA graph: operations are recorded once, and replayed in the same memory
without Python code between them; operations that a GPU refuses meanwhile (syncs, copies) raise.
`bits` rounds operands of products, like tensor cores.

Importing this module registers the device permanently, and other libraries would take it for an
accelerator, so only a separate process may import it (`tests.gpu.measure`). Needs torch ≥ 2.10,
whose PrivateUse1 backend may be written in Python.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

NAME = "pretend"


class _Backend(backend_registration._DummyBackendModule):
    """The module that torch needs for a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_autocast_enabled(self) -> bool:
        return False

    def get_autocast_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def _lazy_init(self) -> None:
        """Do nothing."""

    def synchronize(self, *_: object) -> None:
        """Do nothing."""


backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)


# -- counts ---------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Requests of a stretch of a program to the device.

    Attributes:
        launches: operations on its memory.
        syncs, copies, mixed: by "operation @ file:line".
    """

    launches: int = 0
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)


_now = Counts()


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the operations inside, which may create tensors of the device."""
    global _now
    initial, _now = _now, Counts()
    try:
        with _Factories():
            yield _now
    finally:
        _now = initial


_FREE = """
detach alias view _unsafe_view expand permute transpose t unsqueeze squeeze slice select as_strided
split split_with_sizes unbind diagonal unfold unflatten lift_fresh empty empty_like empty_strided
new_empty new_empty_strided _reshape_alias chunk narrow set_ movedim view_as real imag view_as_real
view_as_complex is_pinned resize_ record_stream
"""
VIEWS = frozenset(_FREE.split())
"""Operations that launch nothing."""

_ANSWERED = """
_local_scalar_dense item equal is_nonzero nonzero masked_select unique2 _unique2 unique_dim
unique_consecutive bincount histc linalg_cholesky _linalg_check_errors linalg_solve linalg_inv
_linalg_eigh _linalg_svd linalg_eig linalg_lstsq linalg_matrix_exp
"""
WAITS = frozenset(_ANSWERED.split())
"""Operations that return a value of the device to the host, which waits for all work before."""

INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


def _line() -> str:
    """Return the running line of the library."""
    frames = traceback.extract_stack()
    for part in (f"{os.sep}recollect{os.sep}", f"{os.sep}tests{os.sep}"):
        for frame in reversed(frames):
            if part in frame.filename and frame.filename != __file__:
                return f"{frame.filename.rpartition(part)[2]}:{frame.lineno}"
    return "autograd"


def _record(
    name: str, overload: str, args: tuple[Any, ...], target: str | None, flat: list[Any]
) -> None:
    """Count the syncs, copies and mixed devices of one operation."""
    ours = any(isinstance(x, Pretend) for x in flat)
    if name in ("_to_copy", "copy_"):
        if name == "copy_":
            to, source = isinstance(args[0], Pretend), isinstance(args[1], Pretend)
        else:
            to, source = ours if target is None else target == NAME, ours
        if source and not to:
            _now.syncs[f"{name} to the host @ {_line()}"] += 1
        elif to and not source:
            _now.copies[f"{name} @ {_line()}"] += 1
        return
    if ours and any(type(x) is Tensor and x.dim() > 0 for x in flat):
        _now.mixed[f"{name} @ {_line()}"] += 1
    indices = args[1] if name in INDEXING else ()
    masks = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
    spread = name == "repeat_interleave" and "Tensor" in overload
    if ours and (name in WAITS or masks or spread):
        _now.syncs[f"{name} @ {_line()}"] += 1


# -- products of fewer bits ----------------------------------------------------------------------

MULTIPLIED = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "addmm": (1, 2)} | {
    "baddbmm": (1, 2), "addmv": (1, 2), "addr": (1, 2), "convolution": (0, 1),
}  # fmt: skip
"""Operations of tensor cores, and the arguments that they multiply."""

bits: int | None = None
"""Bits after the leading one of operands of float32 products.

10 is TF32, 7 is bfloat16. Sums are in float32. ``None`` follows PyTorch's switch for CUDA at each
product.
"""


def _rounded(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operation as tensor cores read them."""
    places = MULTIPLIED.get(name, ())
    if not places:
        return args
    count = 10 if bits is None and torch.backends.cuda.matmul.fp32_precision == "tf32" else bits
    if count is None:
        return args
    return tuple(_kept_bits(x, count) if n in places else x for n, x in enumerate(args))


def _kept_bits(x: Tensor, count: int) -> Tensor:
    """Round to the nearest number with so many bits."""
    if x.dtype != torch.float32:
        return x
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2 ** (count + 1)).round(), exponent - (count + 1))


# -- recorded graphs ------------------------------------------------------------------------------


class Refused(RuntimeError):
    """Raised for operations that a GPU refuses while a graph is recorded."""


Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
_noted: list[Step] | None = None


def record(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Run a function once; return its result, and a replay of its operations in its memory."""
    global _noted
    assert _noted is None
    _noted = steps = []
    initial = sum(_now.syncs.values()) + sum(_now.copies.values())
    try:
        result = run()
    finally:
        _noted = None
    if sum(_now.syncs.values()) + sum(_now.copies.values()) != initial:
        raise Refused(f"{dict(_now.syncs)} {dict(_now.copies)}")

    def replay() -> None:
        with torch.no_grad():
            for func, args, kwargs, out in steps:
                repeated = func(*args, **kwargs)
                for old, new in zip(tree_flatten(out)[0], tree_flatten(repeated)[0], strict=True):
                    if isinstance(old, Tensor) and not _same_place(old, new):
                        old.copy_(new)

    return result, replay


def _same_place(old: Tensor, new: Tensor) -> bool:
    """Whether an operation returned its first result: a view, or its output tensor."""
    is_same = old.data_ptr() == new.data_ptr() and old.stride() == new.stride()
    return old.numel() == 0 or (is_same and old.shape == new.shape)


def _note(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Record an operation on the device's memory while a graph is recorded."""
    if _noted is not None:
        # Aliases of the memory: a tensor that is squeezed in place later has another shape then.
        _noted.append((func, *tree_map(_named_anew, (args, kwargs, out))))
    return out


def enqueued(run: Callable[[], None]) -> None:
    """Count a kernel that is not an operation of torch, and record it in a graph.

    Args:
        run: runs the kernel, in the memory of its arguments.
    """
    _now.launches += 1
    if _noted is not None:
        _noted.append((run, (), {}, None))


def interpreted(kernels: Any, launches: Counter[str]) -> Callable[..., None]:
    """Return a launcher that runs kernels in Triton's interpreter.

    Args:
        kernels: their module.
        launches: number of launches by name of the kernel, which the launcher counts.
    """

    def launch(
        kernel: str,
        programs: int,
        arguments: Sequence[Tensor | int],
        constants: Mapping[str, object],
    ) -> None:
        inputs = [host(x) if isinstance(x, Tensor) else x for x in arguments]

        def run() -> None:
            getattr(kernels, kernel)[(programs,)](*inputs, **constants)

        launches[kernel] += 1
        run()
        enqueued(run)

    return launch


def _named_anew(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


# -- the device -----------------------------------------------------------------------------------


class Pretend(Tensor):
    """A tensor of the device, around a tensor of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Pretend({self.inner!r})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        _now.syncs[f"tolist @ {_line()}"] += 1
        return host(self).tolist()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _RmsNorm(torch.autograd.Function):
    """One launch forward and two backward, like torch on CUDA; other devices need six or more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.rest = shape, eps
        _now.launches += 1
        args = host(x), shape, None if weight is None else host(weight), eps
        return Pretend(_note(functional.rms_norm, args, {}, functional.rms_norm(*args)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x, weight), (shape, eps) = ctx.saved_tensors, ctx.rest
        _now.launches += 2
        parts = [host(part) for part in (x, weight) if part is not None]
        args = host(dy), shape, eps, *parts
        dx, *rest = map(Pretend, _note(_rms_norm_back, args, {}, _rms_norm_back(*args)))
        return dx, None, rest[0] if rest else None, None


def _rms_norm_back(dy: Tensor, shape: Any, eps: float | None, *parts: Tensor) -> list[Tensor]:
    parts = tuple(part.detach().requires_grad_() for part in parts)
    with torch.enable_grad():
        y = functional.rms_norm(parts[0], shape, *parts[1:], eps=eps)
    return list(torch.autograd.grad(y, parts, dy))


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(x, shape, weight, eps)


def _unwrapped(x: Any) -> Any:
    if isinstance(x, Pretend):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _wrapped(x: Any) -> Any:
    return Pretend(x) if type(x) is Tensor else x


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.rpartition("::")[2]
    flat = tree_flatten((args, kwargs))[0]
    ours = any(isinstance(x, Pretend) for x in flat)
    device = kwargs.get("device")
    target = None if device is None else torch.device(device).type
    is_here = ours if target is None else target == NAME
    _record(name, func._overloadname, args, target, flat)
    inner_args, inner_kwargs = tree_map(_unwrapped, (args, kwargs))
    inner_args = _rounded(name, inner_args)
    requested = func
    if func is torch.ops.aten.gelu.out:
        # A CPU leaves gaps in memory unchanged, in float32; a GPU writes them.
        func = _gelu_out
    out = func(*inner_args, **inner_kwargs)
    if not is_here:
        return out
    _note(func, inner_args, inner_kwargs, out)
    if name not in VIEWS:
        _now.launches += 1
    out = tree_map(_wrapped, out)
    return return_and_correct_aliasing(requested, args, kwargs, out) if ours else out


def _gelu_out(x: Tensor, *, out: Tensor, **how: Any) -> Tensor:
    return out.copy_(functional.gelu(x, **how))


class _Factories(TorchDispatchMode):
    """Operations that name the device without a tensor on it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        named = device is not None and torch.device(device).type == NAME
        if named or any(isinstance(x, Pretend) for x in tree_flatten((args, kwargs))[0]):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return Pretend(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return Pretend(torch.empty(size, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(source, Pretend):
        _now.copies[f"copy @ {_line()}"] += 1
    elif not isinstance(to, Pretend):
        _now.syncs[f"copy to the host @ {_line()}"] += 1
    inner = _unwrapped(to), _unwrapped(source)
    _note(Tensor.copy_, inner, {}, inner[0].copy_(inner[1]))
    return to


_OPERATORS = torch.library.Library("aten", "IMPL")
_OPERATORS.impl("_copy_from", _copy_from, "PrivateUse1")
_OPERATORS.impl("empty_strided", _empty_strided, "PrivateUse1")
_OPERATORS.impl("empty.memory_format", _empty, "PrivateUse1")


def _sending(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` and similar functions, which reach a device by a separate path."""

    def factory(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(data, *args, device=device, **kwargs)
        _now.copies[f"{make.__name__} @ {_line()}"] += 1
        return Pretend(make(data, *args, **kwargs))

    return factory


torch.tensor, torch.as_tensor = _sending(torch.tensor), _sending(torch.as_tensor)


# -- copies between host and device ---------------------------------------------------------------


def put(x: Tensor) -> Tensor:
    """Return a copy on the device, without counting."""
    return Pretend(x.detach().clone())


def host(x: Tensor) -> Tensor:
    """Return the numbers of a tensor, without counting."""
    x = x.detach()
    return x.inner if isinstance(x, Pretend) else x


def put_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the device, without counting."""
    moved = copy.deepcopy(module)
    for part in moved.modules():
        for name, x in part._parameters.items():
            if x is not None:
                part._parameters[name] = nn.Parameter(put(x), requires_grad=x.requires_grad)
        for name, x in part._buffers.items():
            part._buffers[name] = None if x is None else put(x)
    return moved
