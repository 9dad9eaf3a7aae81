"""Steps of `gpu_run.py` that measure times, launches and memory."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu_checks import (
    OPERATORS,
    StepContext,
    free_memory,
    has_backend,
    recurrence_call,
    recurrence_shape,
)

import recollect as rc
from recollect.benchmarks.cases.baselines import sdpa_case
from recollect.benchmarks.cases.deep import titans_case
from recollect.benchmarks.cases.recall import Shape, recall_case
from recollect.blocks.cost import cost

__all__ = ["decoding", "deep", "linear", "training"]

Call = Callable[[], object]


def wait(device: str) -> None:
    """Wait for all operations of a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(call: Call, device: str, *, total: float = 0.2, rounds: int = 5) -> float:
    """Return the median seconds of a call that has run before; of a long call, of one."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    single = max(time.perf_counter() - start, 1e-6)
    if single > total:
        return single
    repeats = max(1, min(200, math.ceil(total / rounds / single)))
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait(device)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def peak_mib(call: Call, device: str) -> float | None:
    """Return the MiB that a call allocates in addition to its inputs."""
    if device != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    call()
    wait(device)
    return round((torch.cuda.max_memory_allocated() - allocated) / 2**20, 1)


def capture(call: Call) -> tuple[Call, int]:
    """Return a replay of the call as one CUDA graph, and its number of nodes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        outputs = call()
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))

    def replay(graph: Any = graph, outputs: Any = outputs) -> None:
        graph.replay()

    return replay, count.value


def longest_kernels(call: Call) -> list[list[Any]]:
    """Return name, milliseconds and count of all kernels together and of the eight longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if str(e.device_type).endswith("CUDA")]
    events.sort(key=lambda e: -e.self_device_time_total)
    rows = [[e.key[:60], round(e.self_device_time_total / 1e3, 2), e.count] for e in events]
    total = ["all", round(sum(row[1] for row in rows), 2), sum(row[2] for row in rows)]
    return [total, *rows[:8]]


# -- linear memories -----------------------------------------------------------------------------

TOKENS = 32768


def linear(context: StepContext) -> None:
    """Time linear memories and softmax attention by length, forward lines first."""
    for T, backward, name, method in _linear_cases(context):
        case = {"name": name, "method": method, "T": T, "backward": backward}
        if context.seconds_left() < 4:
            context.write("left out", **case)
            continue
        with context.guard(name, **case):
            shape, operator = recurrence_shape(context, T, TOKENS), None
            if name == "SDPA":
                call = sdpa_case(shape, name=name, backward=backward).make()
            else:
                call, operator = recurrence_call(name, shape, method, backward=backward)
            start = time.time()
            call()
            wait(context.device)
            first = round(time.time() - start, 1)
            if context.warm_up:
                context.write("warmed", **case, first_s=first)
                continue
            peak = peak_mib(call, context.device)
            seconds = seconds_per_call(call, context.device, total=0.02 if context.tiny else 0.15)
            context.write(
                "speed",
                **{**case, "T": shape.T},
                **({} if operator is None else {"operator": operator}),
                B=shape.B,
                H=shape.H,
                D=shape.K,
                ms=round(1e3 * seconds, 4),
                tflops=_tflops(name, shape, seconds, backward=backward),
                peak_mib=peak,
                first_s=first,
            )
            del call
        free_memory(context.device)


def _linear_cases(context: StepContext) -> Iterator[tuple[int, bool, str, str]]:
    """Yield length, whether with the backward pass, preset and method, the most valuable first."""
    kernels = ("fla", "operator") if has_backend(context.device) else ()
    if context.warm_up:
        cases = [(8192, b, name, method) for b in (False, True) for name in OPERATORS
                 for method in kernels]  # fmt: skip
        yield from cases[context.part :: context.num_parts]
        return
    for T in (64,) if context.tiny else (8192, 2048, 32768):
        for backward in (False, True):
            yield T, backward, "SDPA", ""
            for method in (*kernels, "torch"):
                for name in OPERATORS:
                    yield T, backward, name, method


def _tflops(name: str, shape: Shape, seconds: float, *, backward: bool) -> float:
    if name == "SDPA":
        flops = 2 * shape.B * shape.H * shape.T**2 * shape.K * (3.5 if backward else 1)
    else:
        price = cost(name, **shape.sizes)
        flops = price.training if backward else price.total
    return round(flops / seconds / 1e12, 3)


# -- deep memories -------------------------------------------------------------------------------

NO_NORM = "titans without its norm"
DEEP = (("titans", None), ("titans", "tf32"), ("ttt_mlp", None), ("yaad", None), ("atlas", "tf32"))


def deep(context: StepContext) -> None:
    """Time deep memories with the host and as one CUDA graph, then next to titans-pytorch."""
    B, presets = (1, ()) if context.tiny else (8, DEEP)
    for name, precision in (*presets[:2], (NO_NORM, None), *presets[2:]):
        for backward in (False, True):
            _time_deep(context, name, precision, B, "auto", backward=backward)
    _time_titans_pytorch(context, B)
    for name, precision in () if context.tiny else DEEP:
        for backward in (False, True):
            _time_deep(context, name, precision, 1, "auto", backward=backward)


def _time_deep(
    context: StepContext, name: str, precision: str | None, B: int, engine: str, *, backward: bool
) -> None:
    T, H, D = (64, 2, 16) if context.tiny else (4096, 8, 64)
    line: dict[str, Any] = {"name": name, "method": engine, "precision": precision}
    line |= {"B": B, "T": T, "H": H, "D": D, "backward": backward}
    if context.seconds_left() < 5:
        context.write("left out", **line)
        return
    with context.guard(name, **line):
        shape = Shape(B=B, T=T, H=H, K=D, V=D, dtype=torch.bfloat16, device=context.device)
        recipe = rc.zoo.get("titans" if name == NO_NORM else name).recipe
        if name == NO_NORM:
            recipe = recipe.replace(memory=replace(recipe.memory, norm=None))
        case = recall_case(
            recipe, shape, name=name, backward=backward, engine=engine, precision=precision
        )
        recall = case.make()

        def call() -> object:
            with torch.set_grad_enabled(backward):
                return recall()

        start = time.time()
        call()
        wait(context.device)
        first = time.time() - start
        if 2 * first > context.seconds_left():
            context.write("left out", **line, first_s=first)
            return
        line |= {"first_s": round(first, 1), "peak_mib": peak_mib(call, context.device)}
        seconds = seconds_per_call(call, context.device, total=0.02 if context.tiny else 0.2)
        line |= {"ms": round(1e3 * seconds, 3)}
        line |= {"tflops": round((case.flops or 0) / seconds / 1e12, 3)}
        context.write("deep", **line)
        if context.device == "cuda" and context.seconds_left() > 5 + 4 * seconds:
            with context.guard(f"{name} as one CUDA graph", **line):
                replay, line["launches"] = capture(call)
                replay()
                line["graph_ms"] = round(1e3 * seconds_per_call(replay, context.device), 3)
                context.write("deep", **line)
    free_memory(context.device)


def _time_titans_pytorch(context: StepContext, B: int) -> None:
    if importlib.util.find_spec("titans_pytorch") is None:
        context.write("not run", why="titans-pytorch is missing")
        return
    T, T_short = (16, 16) if context.tiny else (4096, 1024)
    for backward in (False,) if context.tiny else (False, True):
        for name, length, chunk in (
            ("recollect, b = 16", T, None),
            ("titans-pytorch, b = 16, gates per batch", T, 16),
            ("titans-pytorch, b = 16, gates per token", T_short, 1),
        ):
            line = {"name": name, "B": B, "T": length, "H": 1, "D": 64, "backward": backward}
            if context.seconds_left() < 4:
                context.write("left out", **line)
                continue
            with context.guard(name, **line):
                shape = Shape(B=B, T=length, H=1, device=context.device)
                options = {"batch_size": 16, "chunk_size": chunk, "backward": backward}
                call = titans_case(shape, name=name, **options).make()
                call()
                peak = peak_mib(call, context.device)
                ms = round(1e3 * seconds_per_call(call, context.device), 3)
                context.write("peer", **line, ms=ms, peak_mib=peak)
                del call
            free_memory(context.device)


# -- decoding ------------------------------------------------------------------------------------

NUM_TOKENS = 16  # of one timed call: an inner batch of titans


def decoding(context: StepContext) -> None:
    """Time a decoded token of a layer: eager, with CUDA graphs, and compiled."""
    width, heads, prompt = (32, 2, 20) if context.tiny else (1024, 16, 512)
    modes = ("eager",) if context.tiny else ("eager", "graphs", "compiled")
    for B in (2,) if context.tiny else (1,) if context.warm_up else (1, 64):
        for name in ("gated_delta_net", "softmax_attention", "titans"):
            torch.manual_seed(0)
            layer = rc.zoo.get(name).build(d_model=width, num_heads=heads).eval()
            layer = layer.to(context.device, torch.bfloat16)
            x = torch.randn(B, prompt + 1, width, device=context.device, dtype=torch.bfloat16)
            with torch.no_grad():
                _, state = layer(x[:, :prompt])
            for mode in modes:
                if context.seconds_left() < 4 or (mode == "compiled" and B != 1):
                    continue
                with context.guard(name, way=mode, B=B):
                    _time_token(context, name, layer, state, x[:, prompt:].contiguous(), mode)


def _time_token(
    context: StepContext, name: str, layer: Any, state: Any, token: Any, mode: str
) -> None:
    max_cache_len = 1024 if name == "softmax_attention" else None
    if mode == "eager":

        @torch.no_grad()
        def steps() -> None:
            current = state
            for _ in range(NUM_TOKENS):
                _, current = layer(token, current)

    else:
        decoder = rc.StaticDecoder(
            layer, state, max_cache_len=max_cache_len, compile=mode == "compiled"
        )
        for _ in range(decoder.warmup_tokens + 2 * decoder.period):
            decoder(token)
            if context.seconds_left() < 3:
                recorded = f"{decoder.num_recorded} of {decoder.period}"
                context.write("left out", name=name, way=mode, recorded=recorded)
                return

        def steps() -> None:
            for _ in range(NUM_TOKENS):
                decoder(token)

    if context.warm_up:
        context.write("warmed", name=name, way=mode)
        return
    # 10 calls fit into the cache of softmax attention.
    wait(context.device)
    steps()
    wait(context.device)
    start = time.perf_counter()
    for _ in range(1 if context.tiny else 10):
        steps()
    wait(context.device)
    seconds = (time.perf_counter() - start) / (NUM_TOKENS * (1 if context.tiny else 10))
    context.write("token", name=name, way=mode, B=token.shape[0], us=round(1e6 * seconds, 2))


# -- training ------------------------------------------------------------------------------------

TRAINING = (
    ("softmax_attention", "auto", False),
    ("gated_delta_net", "auto", False),
    ("titans", "auto", False),
    ("gated_delta_net", "auto", True),
    ("softmax_attention", "auto", True),
    ("gated_delta_net", "torch", False),
)
"""Preset, engine, and whether blocks are compiled; the most valuable first."""


def training(context: StepContext) -> None:
    """Time training steps of models with 170M parameters on random tokens."""
    if importlib.util.find_spec("transformers") is None:
        context.write("not run", why="transformers is missing")
        return
    cases = TRAINING[:2] if context.tiny else TRAINING
    for name, engine, compiled in cases:
        if context.warm_up and engine == "torch":
            continue
        case = {"name": name, "method": engine, "compiled": compiled}
        if context.seconds_left() < 6:
            context.write("left out", **case)
            continue
        with context.guard(name, **case):
            if compiled:
                torch._dynamo.reset()
            _train(context, case)
        free_memory(context.device)


def _train(context: StepContext, case: dict[str, Any]) -> None:
    from recollect.lm.memory_estimate.flops import model_flops

    name, engine = case["name"], case["method"]
    if context.tiny:
        config = rc.lm.RecollectConfig.from_recipes(
            name,
            engine=engine,
            vocab_size=256,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        rows, length = 2, 64
    else:
        layers: dict[str, Any] = {"num_hidden_layers": 2} if context.warm_up else {}
        config = rc.lm.paper_config("170M", name, engine=engine, **layers)
        rows, length = (4, 2048) if name == "titans" else (16, 2048)
    fused = context.device == "cuda"
    if fused:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device(context.device):
        model = rc.lm.RecollectForCausalLM(config).train()
    if case["compiled"]:
        for block in model.model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused)
    ids = torch.randint(config.vocab_size, (rows, length), device=context.device)

    def step() -> Any:
        with torch.autocast(context.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed(count: int) -> tuple[float, float]:
        wait(context.device)
        start = time.time()
        losses = [step() for _ in range(count)]
        loss = float(losses[-1])
        return (time.time() - start) / count, round(loss, 4)

    seconds, first_loss = timed(1)
    context.write("first step", **case, seconds=round(seconds, 2), loss=first_loss)
    if context.warm_up:
        return
    seconds, _ = timed(1)
    seconds, loss = timed(max(1, min(20, int(min(4.0, context.seconds_left() / 3) / seconds))))
    rate = rows * length / seconds
    peak = torch.cuda.max_memory_allocated() / 2**20 if fused else None
    context.write(
        "training",
        **case,
        parameters=sum(p.numel() for p in model.parameters()),
        rows=rows,
        context=length,
        ms=round(1e3 * seconds, 2),
        tokens_per_second=round(rate),
        tflops=round(rate * model_flops(config, context=length) / 1e12, 3),
        loss=[first_loss, loss],
        peak_mib=peak,
    )
    if fused and seconds < 1 and context.seconds_left() > 6:
        context.write("kernels", **case, kernels=longest_kernels(step))
