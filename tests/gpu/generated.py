"""What a compiled token launches on a GPU, counted in the code that is generated for one.

TorchInductor decides what it fuses before anything is compiled or run, from sizes and from what it
is told of the device. Here it is told of an H100, gets a traced token whose tensors say that they
are there, and is stopped when its code is written: a line per launch. Nothing of that code runs
here. ``python -m tests.gpu.generated NAME...`` prints, for each preset, the launches of a token
inside an inner batch, of the one at its end, and their mean.
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


class _Written(Exception):
    """The code is there."""


class _Driver:
    """What Triton asks of the device that is there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return GPU


def _there(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)


_item = Tensor.__getitem__


def _getitem(x: Tensor, index: Any) -> Tensor:
    """Indexing by tensors past the binding, which asks a CPU's torch for its CUDA."""
    parts = index if isinstance(index, tuple) else (index,)
    if x.device == GPU and any(isinstance(one, Tensor) for one in parts):
        by = [one if isinstance(one, Tensor) else None for one in parts]
        return torch.ops.aten.index.Tensor(x, by)
    return _item(x, index)


@contextmanager
def _told() -> Generator[None]:
    """Inside, whoever asks is told that there is a GPU."""
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
    """The code that would decode a token there."""
    graph, _ = traced(layer, x, state)
    code: list[str] = []

    def stop(self: Any) -> None:
        written = self.codegen()[0]
        code.append(getattr(written, "value", written))
        raise _Written

    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [_there(one) for one in (x, *tensors_of(state))]
        for node in graph.graph.nodes:
            node.meta.pop("val", None)
            if node.op == "get_attr":
                kept = getattr(graph, node.target)
                setattr(
                    graph, node.target, nn.Parameter(_there(kept.detach()), requires_grad=False)
                )
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
    graph.recompile()
    with _told(), mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            compile_fx(graph, given)
        except Exception:
            if not code:
                raise
    return code[0]


def launches(code: str) -> int:
    """Kernels that the code starts, its own and a library's."""
    called = code[code.index("def call(") :]
    return len(re.findall(r"\.run\(|extern_kernels\.\w+\(|torch\.ops\.\w+", called))


@torch.no_grad()
def counted(name: str) -> dict[str, object]:
    """Launches of a layer's token, inside an inner batch and at its end."""
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
