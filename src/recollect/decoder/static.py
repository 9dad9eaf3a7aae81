"""Decoding in tensors at fixed addresses, for CUDA graphs.

Decoding is bound by launches: a Titans layer launches about a hundred operations per token. A CUDA
graph removes launches but replays fixed addresses and shapes. The state must therefore stay in
place, and decisions of the host must repeat. The host decides by the phase of the token: its
position in the open inner batch or in the segment of `MemoryAsContext`. A decoder records one graph
per phase. Graph i + 1 reads the state that graph i wrote, and the last graph writes into the first
state::

    state₀ --graph 0--> state₁ --graph 1--> ... --graph p−1--> copied into state₀

A state that grows with the text (a KV cache) has a fixed number of slots with a mask of the filled
ones (`states.Slots`).

With ``compile=True`` TorchInductor first compiles the operations of each phase (`programs`), which
is also several times faster on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from recollect.blocks.as_context import MemoryAsContextLayer
from recollect.choices.runtime import autocast_enabled, cached_constants
from recollect.decoder.programs import Program, Step, program_of
from recollect.decoder.states import (
    Slots,
    copy_into,
    host_position,
    map_state,
    snapshot,
    tensors_of,
)
from recollect.fields import int_check, validate
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["StaticDecoder"]

MAX_GRAPHS = 256
"""Maximum number of graphs or programs of one decoder; each stores its outputs."""

Recorded = tuple[Any, Callable[[], object]]
Record = Callable[[Callable[[], Any]], Recorded]
"""Function that runs a function once, and returns its result and a replay into these tensors."""


class StaticDecoder:
    """Decode one token per call, with the results of the module, in tensors at fixed addresses.

    On a CUDA device each phase of the inner batch is recorded as a CUDA graph after the buffers of
    the state have filled once. Later tokens replay the graph with one launch. On other devices the
    module itself runs.

    With ``compile=True`` TorchInductor compiles each phase at its first token, on every device. It
    takes seconds per phase, makes tokens several times faster (`docs/language-models`), and changes
    results by rounding. Linear memories have one phase, deep ones one per token of the inner batch.
    On a CPU it needs a C++ compiler.

    Calls of one phase may return one tensor: use it, or copy it, before the next call. There are no
    gradients. A module with dropout must be in ``eval()`` mode. Parameters may change in place
    between calls only if no inner batch is open.

    Args:
        module: a `MemoryLayer`, a composition or a language model.
        state: state of a layer, or cache of a language model, after the prompt. It is not changed.
        max_cache_len: number of slots of states that grow with the text (a KV cache), including the
            prompt. Each token takes the time and memory of all slots.
        compile: whether TorchInductor compiles the operations of a token.

    Attributes:
        period: number of phases, and of graphs.
        warmup_tokens: number of tokens until every buffer of the state is full.

    Raises:
        ValueError: no state; a state that grows with the text, without ``max_cache_len``; batch
            elements at different positions of an inner batch; or more phases than `MAX_GRAPHS`. The
            first call raises it if the state has more than ``max_cache_len`` associations. The call
            that records or compiles a phase raises it for a module that depends on a value of a
            tensor, or without a compiler.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
        >>> x = torch.randn(2, 6, 8)
        >>> _, state = layer(x[:, :5])
        >>> decoder = rc.StaticDecoder(layer, state)
        >>> y = decoder(x[:, 5:])
        >>> torch.allclose(y, layer(x[:, 5:], state)[0])
        True
        >>> decoder.state.position
        tensor([6, 6])
    """

    def __init__(
        self,
        module: nn.Module,
        state: Any,
        *,
        max_cache_len: int | None = None,
        compile: bool = False,  # noqa: A002
    ) -> None:
        if state is None or not hasattr(state, "map"):
            raise ValueError(
                f"a static decoder needs the state after the prompt, not {state!r}: run the module "
                "on the prompt, and pass the state or cache that it returns"
            )
        if hasattr(state, "states") != hasattr(module, "lm_head"):
            raise ValueError(
                "a static decoder takes a layer with its state, or a language model (with its "
                f"head) with its cache, not {type(module).__name__} with {type(state).__name__}"
            )
        growing = False
        for name, part in module.named_modules():
            grows = getattr(getattr(part, "mixer", None), "grows", None)
            if (
                grows is None
                and isinstance(part, MemoryLayer)
                and not is_composition_part(module, name)
            ):
                grows = part.recipe.buffer_size is None or part.recipe.uses_kernel_rows
            if grows and max_cache_len is None:
                refuse(
                    f"the state of {name or 'this layer'} grows with the text, and a graph has "
                    "fixed sizes: set max_cache_len=..., use a window, or decode without "
                    "StaticDecoder"
                )
            growing |= bool(grows)
        if max_cache_len is not None:
            validate("StaticDecoder(max_cache_len=...)", int_check(1), max_cache_len)
            if not growing:
                raise ValueError(
                    "StaticDecoder(max_cache_len=...) is for states that grow with the text, and "
                    "this one does not: leave it out"
                )
            if why := next(filter(None, map(why_no_slots, module.modules())), None):
                refuse(f"{why}: decode without StaticDecoder")
        self._module, self._size = module, max_cache_len
        self._slots: Slots | None = None  # set by the first token
        self._num_used = 0
        self.warmup_tokens, self.period = warmup_and_period(module)
        if self.period > MAX_GRAPHS:
            refuse(
                f"its inner batches and segments repeat after {self.period} tokens, and each would "
                f"need a graph (at most {MAX_GRAPHS}): decode without StaticDecoder"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._state = map_state(state, Tensor.clone)
        self._position = host_position(state)
        if self._position is None and self.period > 1:
            refuse(
                "its batch elements are at different positions of their inner batches (padding, "
                "packing or a reset): decode them separately, or without a static decoder"
            )
        self._compiled = compile
        self._record = graph_recorder(tensors_of(self._state)[0].device)
        self._captured: list[Callable[[], Tensor]] = []
        self._first: Any = None
        self._program_output: tuple[Program, list[Tensor]] | None = None
        self._input: Tensor | None = None
        self._kept_constants: tuple[Tensor, ...] = ()
        self._columns, self._num_decoded = getattr(state, "past_length", None) or 0, 0

    @property
    def num_recorded(self) -> int:
        """Number of phases that were recorded or compiled, of ``period``."""
        return len(self._captured)

    @property
    def state(self) -> Any:
        """State after the last token, as a copy that the module can continue."""
        with torch.inference_mode(False), torch.no_grad():
            now = self._current_state()
            if self._slots is not None:
                now = self._slots.fixed(now, self._num_used)
            return snapshot(now, self._columns + self._num_decoded)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output of one token.

        Args:
            x: ``[B, 1, d_model]`` for a layer, the token ``[B, 1]`` for a language model.

        Returns:
            ``[B, 1, d_model]``, or the logits ``[B, 1, vocab]``.

        Raises:
            ValueError: not one token; another shape or type than in the first call; or no free
                slot.
        """
        if x.dim() < 2 or x.shape[1] != 1:
            raise ValueError(f"one token at a time: [B, 1, ...], not {list(x.shape)}")
        fixed_input = self._input
        if fixed_input is not None and _signature(x) != _signature(fixed_input):
            expected, actual = (
                f"{list(t.shape)} of {t.dtype} on {t.device}" for t in (fixed_input, x)
            )
            raise ValueError(
                f"a decoder has fixed sizes: the first input was {expected}, and this one is "
                f"{actual}; create another decoder"
            )
        if self._slots is not None and self._num_used == self._size:
            raise ValueError(
                f"all {self._size} slots are full: create a decoder with more slots from the state "
                "of this one"
            )
        # Tensors that are written to repeatedly must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            if fixed_input is None or self._first is None:
                self._input = x.clone()  # the state may store the input
            else:
                fixed_input.copy_(x)
            try:
                with _without_copies(x.device.type):
                    y = self._next()
            except Exception:
                self._input = fixed_input  # a refused input does not fix the sizes
                raise
        self._num_decoded += 1
        self._num_used += self._slots is not None
        if self._position is not None:
            self._position += 1
        return y

    def _next(self) -> Tensor:
        phase, is_warm = 0, self._num_decoded >= self.period
        if self._position is not None:
            phase, is_warm = (
                self._position % self.period,
                is_warm and self._position >= self.warmup_tokens,
            )
        if self._size is not None and self._slots is None:
            return self._first_growing_token()
        runs_module = self._record is None and not self._compiled
        if runs_module or not (self._captured or (is_warm and phase == 0)):
            y, self._state = self._step(self._input_token(), self._state)
            return y
        return self._captured[phase]() if phase < len(self._captured) else self._capture_phase()

    def _first_growing_token(self) -> Tensor:
        """Run the first token of a state that grows, and put the state into slots."""
        assert self._size is not None
        y, new_state = self._step(self._input_token(), self._state)
        slots = Slots.of(self._state, new_state, self._size)
        used = slots.used(new_state)
        if used > self._size:
            raise ValueError(
                f"StaticDecoder(max_cache_len={self._size}) has too few slots for {used} tokens, "
                "including the prompt: increase max_cache_len"
            )
        self._state, self._slots, self._num_used = slots.fixed(new_state), slots, used - 1
        return y

    def _current_state(self) -> Any:
        """Return the state after the last token, built from the tensors of a program."""
        if self._program_output is not None:
            program, tensors = self._program_output
            self._state, self._program_output = program.state(tensors), None
        return self._state

    def _input_token(self) -> Tensor:
        assert self._input is not None
        return self._input

    def _step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Run the module, with its state in a fixed number of slots."""
        if hasattr(state, "states"):
            out = self._module(x, cache=state, use_cache=True)
            y = out.logits
            # The field is `cache` since transformers 5.24.
            new_state = out.cache if hasattr(out, "cache") else out.past_key_values
        else:
            y, new_state = self._module(x, state)
        return y, new_state if self._slots is None else self._slots.fixed(new_state)

    def _capture_phase(self) -> Tensor:
        """Compile, record and run the next phase."""
        x, step = self._input_token(), self._step
        if not self._captured:
            self._state = map_state(self._state, Tensor.contiguous)
        old_state = self._current_state()
        try:
            if self._compiled:
                step = program = program_of(self._step, x, old_state)
                if self._record is None:
                    self._captured.append(lambda: self._run_program(program))
                    return self._run_program(program)
                step(x, old_state)  # compiled lazily, which must not be recorded
            return self._recorded(step, old_state)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._step(x, old_state)  # raises the module's own error, if it has one
            reason = "its step depends on a value of a tensor, for example a solver's residual"
            if self._compiled and _lacks_compiler(error):
                reason = "no working C++ compiler was found"
            action = "compiled" if self._compiled else "recorded as a graph"
            raise ValueError(
                f"{type(self._module).__name__} cannot be {action}: {reason} "
                f"({_first_line(error)}); decode without StaticDecoder"
            ) from error

    def _run_program(self, program: Program) -> Tensor:
        """Run a compiled program, which needs no fixed tensors."""
        tensors = (
            tensors_of(self._state) if self._program_output is None else self._program_output[1]
        )
        y, tensors_after = program.run(self._input_token(), tensors)
        self._program_output = program, tensors_after
        return y

    def _recorded(self, step: Step, old_state: Any) -> Tensor:
        """Record the next phase and run it."""
        x, last = self._input_token(), len(self._captured) == self.period - 1
        if not self._captured:
            self._first = old_state = map_state(old_state, Tensor.clone)
        assert self._record is not None

        def run() -> tuple[Tensor, Any]:
            y, new_state = step(x, old_state)
            if last:
                copy_into(self._first, new_state)
            return y, new_state

        (y, new_state), replay = self._record(run)
        self._state = new_state = self._first if last else new_state

        def replayed() -> Tensor:
            replay()
            self._state = new_state
            return y

        self._captured.append(replayed)
        self._kept_constants = cached_constants()  # graphs read them
        return y


def graph_recorder(device: torch.device) -> Record | None:
    """Return a function that records CUDA graphs in one memory pool; ``None`` on other devices."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Any]) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = run()
        graph.replay()  # recording does not run the operations
        return result, graph.replay

    return record


def _without_copies(kind: str) -> AbstractContextManager[object]:
    """Disable autocast's cache of weights, which a graph would read after they are freed."""
    if not autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _signature(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.device


def _lacks_compiler(error: BaseException | None) -> bool:
    """Return whether an error of TorchInductor, or its cause, is about the compiler."""
    from torch._inductor import exc

    if error is None or isinstance(error, exc.InvalidCxxCompiler | exc.CppCompileError):
        return error is not None
    return _lacks_compiler(getattr(error, "inner_exception", None) or error.__cause__)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def why_no_slots(part: nn.Module) -> str | None:
    """Return the reason why this part of a module prevents a fixed number of slots, or ``None``."""
    if isinstance(part, MemoryAsContextLayer):
        return "MemoryAsContext resets its attention in each segment, which slots do not support"
    if (
        isinstance(part, MemoryLayer)
        and part.recipe.uses_kernel_rows
        and part.recipe.algorithm.batch_size > 1
    ):
        return (
            f"{part.recipe.algorithm.title} with batches over infinitely many features needs the "
            "position on the host, which is unknown with empty slots"
        )
    return None


def warmup_and_period(module: nn.Module) -> tuple[int, int]:
    """Return the number of tokens until all buffers are full, and the period of host decisions."""
    warm, periods = 0, [1]
    for part in module.modules():
        if isinstance(part, MemoryLayer):
            batch, n = part.recipe.algorithm.batch_size, part.recipe.associations_per_token
            warm = max(warm, batch + (part.recipe.num_past_associations or 0) // n)
            if batch > 1:
                periods.append(batch)
        elif isinstance(part, MemoryAsContextLayer):
            warm = max(warm, part.segment)
            periods.append(part.segment)
    return warm, math.lcm(*periods)


def is_composition_part(module: nn.Module, name: str) -> bool:
    """Return whether a part belongs to a composition."""
    parents = name.split(".")[:-1]
    paths = [".".join(parents[:n]) for n in range(len(parents) + 1)]
    return any(hasattr(module.get_submodule(path), "mixer") for path in paths)


def refuse(why: str) -> NoReturn:
    """Raise a ValueError with the reason why a module cannot decode in fixed tensors."""
    raise ValueError(f"this cannot be decoded in fixed tensors: {why}")
