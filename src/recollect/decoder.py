"""One token at a time in tensors that stay where they are, so that a CUDA graph can record it.

A decoded token is bound by what the host says, not by what the device does: a Titans layer asks
for about a hundred operations a token. A CUDA graph says them once; but it replays addresses and
shapes, so state must be found where it was, and what the host decides must come out alike at each
replay. Here the host decides by one number, how many tokens were seen, and by that only through its
place in the open inner batch (or MAC's segment). So a decoder records one graph per place: the
state that graph i leaves is what graph i + 1 was recorded on, and the last one writes into the
first one's::

    state₀ --graph 0--> state₁ --graph 1--> ... --graph p−1--> copied into state₀
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from recollect.blocks.as_context import AsContextLayer
from recollect.choices.devices import autocasts, constants
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["StaticDecoder"]

MOST = 256
"""Graphs of one decoder: each keeps what it computes."""

Recorded = tuple[Any, Callable[[], object]]
Record = Callable[[Callable[[], Any]], Recorded]


class StaticDecoder:
    """Decodes token after token, as calling the module does, in tensors that stay where they are.

    On a CUDA device each place of the inner batch is recorded as a CUDA graph the first time that
    it is met, after the buffers of the state have filled once, and replayed from then on: the host
    then says one operation per token. On other devices the operations run one by one.

    What comes back is the same tensor each time the same place is met: use it, or copy it, before
    the next call. No gradients; the module must be in ``eval()`` where it has dropout, and its
    parameters may change in place between calls only where no inner batch is open.

    Args:
        module: a `MemoryLayer`, a composition or a language model.
        state: after the prompt: a layer's state, or a language model's cache. It stays as it is.
        record: runs a function of no arguments once and returns what it returned, with a function
            that runs it again into the same tensors. CUDA graphs on CUDA devices when omitted.

    Attributes:
        period: tokens after which the host decides alike again, and so graphs.
        warm: tokens until every buffer of the state has filled.

    Raises:
        ValueError: no state; one that grows with the text; rows that have come differently far in
            an inner batch; more places than can be recorded; and, at the call that would record it,
            a module that asks the device for a value.

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

    def __init__(self, module: nn.Module, state: Any, *, record: Record | None = None) -> None:
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
        for name, part in module.named_modules():
            grows = getattr(getattr(part, "mixer", None), "grows", None)
            if grows is None and isinstance(part, MemoryLayer) and not _inside(module, name):
                grows = part.recipe.span is None or part.recipe.dual
            if grows:
                what = f"the state of {name or 'this layer'} grows with the text"
                _refuse(f"{what}, and a graph has one size: give it a window, or decode without")
        self._module = module
        self.warm, self.period = _rhythm(module)
        if self.period > MOST:
            _refuse(
                f"its inner batches and segments meet again after {self.period} tokens, each of "
                f"which would be a graph of its own (at most {MOST}): decode without"
            )
        with torch.inference_mode(False), torch.no_grad():
            self._state = _map(state, Tensor.clone)
        self._seen = _seen(state)
        if self._seen is None and self.period > 1:
            _refuse(
                "its rows have come differently far in their inner batches (padding, packing or a "
                "reset): decode them apart, or without a static decoder"
            )
        self._record = record
        self._graphs: list[tuple[Tensor, Callable[[], object]]] = []
        self._after: list[Any] = []
        self._first: Any = None
        self._input: Tensor | None = None
        self._held: tuple[Tensor, ...] = ()
        self._columns, self._done = getattr(state, "seen", None) or 0, 0

    @property
    def graphs(self) -> int:
        """How many places were recorded so far, of ``period``."""
        return len(self._graphs)

    @property
    def state(self) -> Any:
        """The state after the last token: a copy, from which the module itself goes on."""
        with torch.inference_mode(False), torch.no_grad():
            return _counted(self._state, self._columns + self._done)

    def __call__(self, x: Tensor) -> Tensor:
        """The output of one token.

        Args:
            x: ``[B, 1, d_model]`` for a layer, the token ``[B, 1]`` for a language model.

        Returns:
            ``[B, 1, d_model]``, or the logits ``[B, 1, vocab]``.

        Raises:
            ValueError: not one token, or another shape or type than that of the first call.
        """
        if x.dim() < 2 or x.shape[1] != 1:
            raise ValueError(f"one token at a time: [B, 1, ...], not {list(x.shape)}")
        kept = self._input
        if kept is not None and _kind(x) != _kind(kept):
            raise ValueError(
                f"a decoder keeps its sizes: the first call's input was {_kind(kept)}, this one is "
                f"{_kind(x)}; make another decoder"
            )
        # What is written to again and again must be no tensor of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if kept is None:
                self._input = x.clone()
            else:
                kept.copy_(x)
            try:
                with _without_copies(x.device.type):
                    y = self._next()
            except Exception:
                self._input = kept  # what was refused decides no sizes
                raise
        self._done += 1
        if self._seen is not None:
            self._seen += 1
        return y

    def _next(self) -> Tensor:
        place, warm = 0, self._done >= self.period
        if self._seen is not None:
            place, warm = self._seen % self.period, warm and self._seen >= self.warm
        if not self._graphs and not (warm and place == 0):
            y, self._state = self._step(self._state)
        elif len(self._graphs) < self.period:
            y = self._recorded()
        else:
            y, again = self._graphs[place]
            again()
            self._state = self._after[place]
        return y

    def _step(self, state: Any) -> tuple[Tensor, Any]:
        """The module's own step."""
        assert self._input is not None
        if hasattr(state, "states"):
            out = self._module(self._input, past_key_values=state, use_cache=True)
            return out.logits, out.past_key_values
        return self._module(self._input, state)

    def _recorded(self) -> Tensor:
        """Record the next place, and run it."""
        assert self._input is not None
        if not self._graphs:
            self._first = self._state = _map(self._state, Tensor.clone)
        if self._record is None:
            self._record = _cuda_graphs() if self._input.device.type == "cuda" else _again
        before, last = self._state, len(self._graphs) == self.period - 1

        def run() -> tuple[Tensor, Any]:
            y, after = self._step(before)
            if last:
                _write(self._first, after)
            return y, after

        try:
            (y, after), again = self._record(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"{type(self._module).__name__} cannot be recorded as a graph, for example because "
                "its solver asks after each step whether it has converged: decode without "
                f"({error})"
            ) from error
        self._graphs.append((y, again))
        self._after.append(self._first if last else after)
        self._held = constants()  # what a graph reads must not be freed
        self._state = self._after[-1]
        return y


def _rhythm(module: nn.Module) -> tuple[int, int]:
    """Tokens until every buffer has filled, and after how many the host decides alike again."""
    warm, periods = 0, [1]
    for part in module.modules():
        if isinstance(part, MemoryLayer):
            batch = part.recipe.algorithm.batch
            warm = max(warm, batch + (part.recipe.history or 0))
            if batch > 1:
                periods.append(batch)
        elif isinstance(part, AsContextLayer):
            warm = max(warm, part.segment)
            periods.append(part.segment)
    return warm, math.lcm(*periods)


def _inside(module: nn.Module, name: str) -> bool:
    """Whether a part belongs to a composition, which answers for its parts."""
    parents = name.split(".")[:-1]
    paths = [".".join(parents[:n]) for n in range(len(parents) + 1)]
    return any(hasattr(module.get_submodule(path), "mixer") for path in paths)


def _states(state: Any) -> Sequence[Any]:
    return state.states if hasattr(state, "states") else (state,)


def _seen(state: Any) -> int | None:
    """Tokens that every row of every layer has seen, where the host knows it."""
    seen = {one.seen for one in _states(state)}
    return seen.pop() if len(seen) == 1 else None


def _map(state: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``f`` to every tensor of a layer's state, or of all layers' in a cache."""
    return state.map((lambda one: one.map(f)) if hasattr(state, "states") else f)


def _counted(state: Any, columns: int) -> Any:
    """A copy whose numbers of the host are those of its tensors, not those of the recorded step.

    Args:
        state: of a layer, or a language model's cache.
        columns: that the cache has seen.
    """
    if hasattr(state, "states"):
        return type(state)([_counted(one, columns) for one in state.states], columns)
    return type(state).from_dict(state.map(Tensor.clone).to_dict())


def _tensors(state: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    _map(state, note)
    return found


def _write(first: Any, after: Any) -> None:
    """Put the numbers of one state into the tensors of another."""
    there, new = _tensors(first), _tensors(after)
    owned = {_place_of(x) for x in there}
    # What is only a view of a tensor that will be written to is read before any is.
    fresh = [
        x.clone() if x is not old and _place_of(x) in owned else x
        for old, x in zip(there, new, strict=True)
    ]
    for old, x in zip(there, fresh, strict=True):
        if x is not old:
            old.copy_(x)


def _place_of(x: Tensor) -> int:
    """A name of the memory that a tensor is in, which views share."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _again(run: Callable[[], Any]) -> Recorded:
    """No graph: the same operations once more, into the tensors of the first time."""
    y, after = run()
    kept = [y, *_tensors(after)]

    def again() -> None:
        told, state = run()
        for old, x in zip(kept, [told, *_tensors(state)], strict=True):
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


def _kind(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype} on {x.device}"


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"this cannot be decoded in fixed tensors: {why}")
