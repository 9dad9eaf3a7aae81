"""Launches of a compiled token on a GPU, counted in the generated code.

TorchInductor decides on fusion before it compiles or runs anything, from sizes and from properties
of the device. Here it gets the properties of an H100 and a traced token whose tensors claim that
device, and stops when its code is written: one line per launch. The code does not run. ``python -m
tests.gpu.generated NAME...`` prints, for each preset, the launches of a token inside an inner
batch, of the token at its end, and their mean.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

import recollect as rc
from recollect.decoder.programs import DEVICE_OPTIONS, traced
from recollect.decoder.states import tensors_of

WIDTH, INSIDE = 64, 5
GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="H100",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
)


class _CodeReady(Exception):
    """Raised when the code is written."""


class _Driver:
    """The Triton driver of the claimed device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return GPU


def _on_device(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)


_item = Tensor.__getitem__


def _getitem(x: Tensor, index: Any) -> Tensor:
    """Index by tensors without the binding, which would look for CUDA."""
    parts = index if isinstance(index, tuple) else (index,)
    if x.device == GPU and any(isinstance(one, Tensor) for one in parts):
        by = [one if isinstance(one, Tensor) else None for one in parts]
        return torch.ops.aten.index.Tensor(x, by)
    return _item(x, index)


@contextmanager
def _claim_gpu() -> Generator[None]:
    """Report an available GPU inside this context."""
    import triton

    def gpu(*_: object) -> Any:
        return H100

    result: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": gpu,
            "get_device_capability": lambda *_: (9, 0),
            "get_rng_state": lambda *_: torch.zeros(8, dtype=torch.uint8),
            "set_rng_state": lambda *_: None,
            "_exchange_device": lambda _: 0,
            "_maybe_exchange_device": lambda _: 0,
        },
        CudaInterface: {
            "get_device_properties": staticmethod(gpu),
            "get_compute_capability": staticmethod(lambda *_: 90),
        },
        CudaInterface.Worker: {"get_device_properties": staticmethod(gpu)},
        # Patterns that are traced on the device before anything else.
        joint_graph: {"lazy_init": lambda *_, **__: None},
        post_grad: {"lazy_init": lambda *_, **__: None},
        # Copies have no effect on shapes.
        Tensor: {"__getitem__": _getitem, "copy_": lambda x, *_: x},
        triton.runtime.driver: {"_active": _Driver()},
    }
    options = {**DEVICE_OPTIONS, "fx_graph_cache": False, "joint_graph_constant_folding": False}
    with ExitStack() as stack:
        for owner, names in result.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch._inductor.config.patch(options))
        yield


def code_of(layer: nn.Module, x: Tensor, state: Any) -> str:
    """Return the code that would decode a token on the device."""
    graph, _ = traced(layer, x, state)
    code: list[str] = []

    def stop(self: Any) -> None:
        source = self.codegen()[0]
        code.append(getattr(source, "value", source))
        raise _CodeReady

    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = [_on_device(one) for one in (x, *tensors_of(state))]
        for node in graph.graph.nodes:
            node.meta.pop("val", None)
            if node.op == "get_attr":
                attribute = getattr(graph, node.target)
                setattr(
                    graph,
                    node.target,
                    nn.Parameter(_on_device(attribute.detach()), requires_grad=False),
                )
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
    graph.recompile()
    with _claim_gpu(), mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_fx(graph, arguments)
        except Exception:
            if not code:
                raise
    return code[0]


def launches(code: str) -> int:
    """Return the kernels that the code starts, generated ones and a library's."""
    called = code[code.index("def call(") :]
    return len(re.findall(r"\.run\(|extern_kernels\.\w+\(|torch\.ops\.\w+", called))


@torch.no_grad()
def counted(name: str) -> dict[str, object]:
    """Return launches of a layer's token, inside an inner batch and at its end."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=WIDTH, num_heads=1).eval()
    batch = layer.recipe.algorithm.batch_size
    recorded = 2 * batch + (layer.recipe.num_past_associations or 0) // batch * batch
    x = torch.randn(1, recorded + batch, WIDTH)
    _, state = layer(x[:, :1])
    result: dict[int, int] = {}
    for t in range(1, recorded + batch):
        token, place = x[:, t : t + 1], t - recorded
        state = state.map(Tensor.contiguous)
        if place in {min(INSIDE, batch - 1), batch - 1}:
            result[place] = launches(code_of(layer, token, state))
        _, state = layer(token, state)
    inside, end = result[min(result)], result[max(result)]
    mean = ((batch - 1) * inside + end) / batch
    return {"name": name, "inside": inside, "end": end, "mean": round(mean, 1)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for one in sys.argv[1:]:
        print(json.dumps(counted(one)), flush=True)
