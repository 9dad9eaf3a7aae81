"""One token at a time in tensors that stay where they are, so that a CUDA graph can record it.

A decoded token is bound by what the host says, not by what the device does: a Titans layer asks
for about a hundred operations a token. A CUDA graph says them once; but it replays addresses and
shapes, so state must be found where it was, and what the host decides must come out alike at each
replay. Here the host decides by one number, how many tokens were seen, and by that only through its
place in the open inner batch (or MAC's segment). So a decoder records one graph per place: the
state that graph i leaves is what graph i + 1 was recorded on, and the last one writes into the
first one's::

    state₀ --graph 0--> state₁ --graph 1--> ... --graph p−1--> copied into state₀

A state that grows with the text (attention's cache) is kept in a fixed number of slots: empty ones
stand in front, each token takes one, and masks say which hold nothing (`states.Slots`).

Where it is asked to, a compiler first makes one program of each place's operations (`programs`):
fewer and larger ones. Then a CPU decodes several times as fast too, and needs no fixed tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from recollect.choices.devices import autocasts, constants
from recollect.decoder.fitting import inside, refuse, rhythm, without_slots
from recollect.decoder.programs import Program, Step, program_of
from recollect.decoder.states import Slots, counted, mapped, seen_of, tensors_of, write
from recollect.fields import held, whole
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["StaticDecoder"]

MOST = 256
"""Graphs or programs of one decoder: each keeps what it computes."""

Recorded = tuple[Any, Callable[[], object]]
Record = Callable[[Callable[[], Any]], Recorded]


class StaticDecoder:
    """Decodes token after token, as calling the module does, in tensors that stay where they are.

    On a CUDA device each place of the inner batch is recorded as a CUDA graph the first time that
    it is met, after the buffers of the state have filled once, and replayed from then on: the host
    then says one operation per token. On other devices the operations run one by one.

    With ``compiled=True`` TorchInductor compiles each place the first time that it is met, on every
    device: seconds a place, several times the speed of a token after that (`docs/language-models`),
    and numbers that differ by rounding. Linear memories have one place, deep ones as many as their
    inner batch has tokens. On a CPU it needs a C++ compiler.

    What comes back may be the same tensor each time the same place is met: use it, or copy it,
    before the next call. No gradients; the module must be in ``eval()`` where it has dropout, and
    its parameters may change in place between calls only where no inner batch is open.

    Args:
        module: a `MemoryLayer`, a composition or a language model.
        state: after the prompt: a layer's state, or a language model's cache. It stays as it is.
        slots: for states that grow with the text (attention's cache): how many associations a
            memory may hold, the prompt's among them. Each token takes the time and memory of so
            many.
        compiled: whether a compiler brings a token's operations together.
        record: runs a function of no arguments once and returns what it returned, with a function
            that runs it again into the same tensors. CUDA graphs on CUDA devices when omitted.

    Attributes:
        period: tokens after which the host decides alike again, and so graphs.
        warm: tokens until every buffer of the state has filled.

    Raises:
        ValueError: no state; one that grows with the text and no slots; rows that have come
            differently far in an inner batch; more places than can be recorded; and, at the call
            that would record or compile it, a module that asks for a value, or no compiler; at the
            first call, more associations in the state than slots.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, heads=2)
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
        slots: int | None = None,
        compiled: bool = False,
        record: Record | None = None,
    ) -> None:
        if state is None or not hasattr(state, "map"):
            raise ValueError(
                "a static decoder goes on from a state: read the prompt first, and give the state "
                f"(or the cache) that came back, not {state!r}"
            )
        if hasattr(state, "states") != hasattr(module, "lm_head"):
            raise ValueError(
                "a static decoder takes a layer with its state, or a language model (with its "
                f"head) with its cache, not {type(module).__name__} with {type(state).__name__}"
            )
        growing = False
        for name, part in module.named_modules():
            grows = getattr(getattr(part, "mixer", None), "grows", None)
            if grows is None and isinstance(part, MemoryLayer) and not inside(module, name):
                grows = part.recipe.span is None or part.recipe.dual
            if grows and slots is None:
                what = f"the state of {name or 'this layer'} grows with the text"
                refuse(
                    f"{what}, and a graph has one size: say how many tokens it may hold "
                    "(slots=...), give it a window, or decode without"
                )
            growing |= bool(grows)
        if slots is not None:
            held("StaticDecoder(slots=...)", whole(1), slots)
            if not growing:
                raise ValueError(
                    "StaticDecoder(slots=...) is for states that grow with the text, and this one "
                    "does not: leave it out"
                )
            if why := next(filter(None, map(without_slots, module.modules())), None):
                refuse(f"{why}: decode without")
        self._module, self._size = module, slots
        self._slots: Slots | None = None  # after the first token, which shows what grows
        self._used = 0
        self.warm, self.period = rhythm(module)
        if self.period > MOST:
            refuse(
                f"its inner batches and segments meet again after {self.period} tokens, each of "
                f"which would be a graph of its own (at most {MOST}): decode without"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._state = mapped(state, Tensor.clone)
        self._seen = seen_of(state)
        if self._seen is None and self.period > 1:
            refuse(
                "its rows have come differently far in their inner batches (padding, packing or a "
                "reset): decode them apart, or without a static decoder"
            )
        self._compiled, self._record = compiled, record
        self._places: list[Callable[[], Tensor]] = []
        self._first: Any = None
        self._left: tuple[Program, list[Tensor]] | None = None
        self._input: Tensor | None = None
        self._held: tuple[Tensor, ...] = ()
        self._columns, self._done = getattr(state, "seen", None) or 0, 0

    @property
    def graphs(self) -> int:
        """How many places were recorded or compiled so far, of ``period``."""
        return len(self._places)

    @property
    def state(self) -> Any:
        """The state after the last token: a copy, from which the module itself goes on."""
        with torch.inference_mode(False), torch.no_grad():
            now = self._now()
            if self._slots is not None:
                now = self._slots.fixed(now, self._used)
            return counted(now, self._columns + self._done)

    def __call__(self, x: Tensor) -> Tensor:
        """The output of one token.

        Args:
            x: ``[B, 1, d_model]`` for a layer, the token ``[B, 1]`` for a language model.

        Returns:
            ``[B, 1, d_model]``, or the logits ``[B, 1, vocab]``.

        Raises:
            ValueError: not one token; another shape or type than that of the first call; or no slot
                left.
        """
        if x.dim() < 2 or x.shape[1] != 1:
            raise ValueError(f"one token at a time: [B, 1, ...], not {list(x.shape)}")
        kept = self._input
        if kept is not None and _kind(x) != _kind(kept):
            first, now = (f"{list(one.shape)} of {one.dtype} on {one.device}" for one in (kept, x))
            raise ValueError(
                f"a decoder keeps its sizes: the first call's input was {first}, this one is "
                f"{now}; make another decoder"
            )
        if self._slots is not None and self._used == self._size:
            raise ValueError(
                f"all {self._size} slots hold a token: make another decoder with more, from this "
                "one's state"
            )
        # What is written to again and again must be no tensor of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if kept is None or self._first is None:
                self._input = x.clone()  # a state may hold the last token's
            else:
                kept.copy_(x)
            try:
                with _without_copies(x.device.type):
                    y = self._next()
            except Exception:
                self._input = kept  # what was refused decides no sizes
                raise
        self._done += 1
        self._used += self._slots is not None
        if self._seen is not None:
            self._seen += 1
        return y

    def _next(self) -> Tensor:
        place, warm = 0, self._done >= self.period
        if self._seen is not None:
            place, warm = self._seen % self.period, warm and self._seen >= self.warm
        if self._size is not None and self._slots is None:
            return self._grown()
        if not self._places and not (warm and place == 0):
            y, self._state = self._step(self._given(), self._state)
            return y
        return self._places[place]() if place < len(self._places) else self._met()

    def _grown(self) -> Tensor:
        """The first token of a state that grows, after which it has its slots."""
        assert self._size is not None
        y, after = self._step(self._given(), self._state)
        slots = Slots.of(self._state, after, self._size)
        used = slots.used(after)
        if used > self._size:
            raise ValueError(
                f"StaticDecoder(slots={self._size}) has no room for {used} tokens, the prompt's "
                "among them: give more slots"
            )
        self._state, self._slots, self._used = slots.fixed(after), slots, used - 1
        return y

    def _now(self) -> Any:
        """The state after the last token, of which a program leaves the tensors alone."""
        if self._left is not None:
            program, tensors = self._left
            self._state, self._left = program.state(tensors), None
        return self._state

    def _given(self) -> Tensor:
        assert self._input is not None
        return self._input

    def _step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The module's own step, its state in as many slots as before."""
        if hasattr(state, "states"):
            out = self._module(x, cache=state, use_cache=True)
            y = out.logits
            # Its name in transformers since 5.24, and the one before.
            after = out.cache if hasattr(out, "cache") else out.past_key_values
        else:
            y, after = self._module(x, state)
        return y, after if self._slots is None else self._slots.fixed(after)

    def _met(self) -> Tensor:
        """The next place for the first time: compiled, recorded, and run."""
        x, step = self._given(), self._step
        if not self._places:
            self._state = mapped(self._state, lambda one: one.contiguous())
        before = self._now()
        try:
            if self._compiled:
                step = program = program_of(self._step, x, before)
                if self._record is None and x.device.type != "cuda":
                    self._places.append(lambda: self._ran(program))
                    return self._ran(program)
                step(x, before)  # what a compiler leaves to the first call must not be recorded
            return self._recorded(step, before)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = type(self._module).__name__
            if self._compiled and "compiler" in str(error).lower():
                why = f": there is no C++ compiler that works ({_first_line(error)})"
            else:
                why = (
                    ", for example because its solver asks after each step whether it has "
                    f"converged: decode without ({_first_line(error)})"
                )
            what = "compiled" if self._compiled else "recorded as a graph"
            raise ValueError(f"{name} cannot be {what}{why}") from error

    def _ran(self, program: Program) -> Tensor:
        """A token by a program, which needs no fixed tensors."""
        tensors = tensors_of(self._state) if self._left is None else self._left[1]
        y, left = program.run(self._given(), tensors)
        self._left = program, left
        return y

    def _recorded(self, step: Step, before: Any) -> Tensor:
        """Record the next place, and run it."""
        x, last = self._given(), len(self._places) == self.period - 1
        if not self._places:
            self._first = before = mapped(before, Tensor.clone)
        if self._record is None:
            self._record = _cuda_graphs() if x.device.type == "cuda" else _again

        def run() -> tuple[Tensor, Any]:
            y, after = step(x, before)
            if last:
                write(self._first, after)
            return y, after

        (y, after), again = self._record(run)
        self._state = after = self._first if last else after

        def replayed() -> Tensor:
            again()
            self._state = after
            return y

        self._places.append(replayed)
        self._held = constants()  # what a graph reads must not be freed
        return y


def _again(run: Callable[[], Any]) -> Recorded:
    """No graph: the same operations once more, into the tensors of the first time."""
    y, after = run()
    after = mapped(after, torch.Tensor.contiguous)  # written to below: no view of one number
    kept = [y, *tensors_of(after)]

    def again() -> None:
        told, state = run()
        for old, x in zip(kept, [told, *tensors_of(state)], strict=True):
            if x is not old:
                old.copy_(x)

    return (y, after), again


def _cuda_graphs() -> Record:
    """Records CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], Any]) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            found = run()
        graph.replay()  # while it is recorded nothing runs
        return found, graph.replay

    return record


def _without_copies(kind: str) -> AbstractContextManager[object]:
    """Autocast, where it is on, keeps no copies of weights: a graph would read them when gone."""
    if not autocasts(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _kind(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.device


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
