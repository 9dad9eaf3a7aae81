"""`trace`: the associations that a layer's memory returns after each token.

After token t, the memory is read at the key of every association s so far. The tables hold

    y_ts = M(W_t; φ(k_s)),    cos(y_ts, v_s)    and    ‖y_ts − v_s‖ / ‖v_s‖
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.blocks.layers import MixerLayer
from recollect.explanation.diagnosis import curves_to_json, format_change, text_table
from recollect.explanation.model_inputs import (
    MemoryRun,
    model_inputs,
    received_tokens,
    refuse_composition,
)
from recollect.layer.checks import check_tokens
from recollect.layer.memory_layer import MemoryLayer
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from recollect.report.figures import RenderedFigure

__all__ = ["Trace", "read_back", "token_label", "trace"]

MAX_ASSOCIATIONS = 512
"""Associations of a trace; the memory is read at T of them after each of T tokens."""

MAX_LABELS = 40
"""Words on an axis of the plot."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The values that a memory returns for the keys of earlier tokens.

    With T tokens of n associations each, association s belongs to token s // n. Entries of
    associations that are later than the token, or whose value is zero, are NaN.

    Attributes:
        recipe: recipe of the layer.
        layer: name of the layer in the model; empty if the layer itself was traced.
        tokens: T words.
        cosine_similarity: cosine of the returned and the stored value, ``[T, T·n, H]``.
        relative_error: norm of their difference over the norm of the stored value,
            ``[T, T·n, H]``.

    Examples:
        >>> layer = rc.zoo.get("delta_net").build(d_model=8, num_heads=2)
        >>> result = rc.trace(layer, torch.randn(1, 5, 8))
        >>> result.cosine_similarity.shape
        torch.Size([5, 5, 2])
    """

    recipe: Recipe
    layer: str
    tokens: tuple[str, ...]
    cosine_similarity: Tensor
    relative_error: Tensor

    @property
    def num_heads(self) -> int:
        """H, number of memories."""
        return self.cosine_similarity.shape[-1]

    @property
    def associations(self) -> tuple[str, ...]:
        """Names of the T·n associations: the word of the token, and a number if it has several."""
        n = self.cosine_similarity.shape[1] // len(self.tokens)
        if n == 1:
            return self.tokens
        return tuple(f"{token} {i + 1}" for token in self.tokens for i in range(n))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as data for JSON: tensors as lists, NaN as null."""
        fields = {name: curves_to_json(value) for name, value in vars(self).items()}
        return {**fields, "tokens": [*self.tokens], "associations": [*self.associations]}

    def __str__(self) -> str:
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html(notebook=True)

    def _table(self) -> Table:
        """Each association after its own token and after the last one: means over the heads."""
        names = self.associations
        index = torch.arange(len(names))
        token, last = index // (len(names) // len(self.tokens)), len(self.tokens) - 1
        columns = {"token": [str(t) for t in token.tolist()], "word": list(names)}
        for title, table in (("cosine", self.cosine_similarity), ("error", self.relative_error)):
            means = table.nanmean(-1)
            columns[title] = format_change(means[token, index], means[last])
        layer = f"layer {self.layer}, " if self.layer else ""
        heads, tokens = self.num_heads, len(self.tokens)
        sizes = f"{heads} head{'s' * (heads != 1)}, {tokens} token{'s' * (tokens != 1)}"
        return text_table(f"{layer}{sizes}", columns, [_NOTE])

    def plot(self, title: str = "", *, head: int | None = None) -> RenderedFigure:
        """Draw the cosine similarities as an image, with the words on both axes.

        Args:
            title: title of the figure; the equation of the memory by default.
            head: index of the memory; by default the mean over all memories.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: a head that the layer does not have.
        """
        from recollect.report.figures import new_figure, render_figure

        if head is not None and not 0 <= head < self.num_heads:
            raise ValueError(f"head must be from 0 to {self.num_heads - 1}, not {head}")
        table = self.cosine_similarity
        values = table.nanmean(-1) if head is None else table[..., head]
        label = f"mean of {self.num_heads} heads" if head is None else f"head {head}"
        with new_figure() as canvas:
            side = min(7.2, 2.4 + 0.22 * min(max(table.shape[:2]), MAX_LABELS))
            canvas.set_size_inches(side, side + 0.8)
            axes = canvas.subplots()
            image = axes.imshow(
                values.numpy(), cmap="PuOr", vmin=-1, vmax=1, aspect="auto", interpolation="none"
            )
            _label(axes, "x", self.associations)
            _label(axes, "y", self.tokens)
            axes.grid(visible=False)
            axes.set_xlabel("read at the key of")
            axes.set_ylabel("after")
            axes.set_title(
                title or self.recipe.memory.prediction_text("k_t"),
                loc="left",
                fontsize=11,
                fontweight="bold",
            )
            label = f"cosine similarity, {label}"
            canvas.colorbar(image, ax=axes, label=label, location="bottom", fraction=0.04)
            return render_figure(canvas)


_NOTE = "cosine and error of the returned value: after its own token → after the last token"


def _label(axes: Axes, axis: str, words: Sequence[str]) -> None:
    """Label an axis with words, of many with each n-th."""
    positions = range(0, len(words), -(-len(words) // MAX_LABELS))
    rotation = {"rotation": 90} if axis == "x" else {}
    getattr(axes, f"set_{axis}ticks")(
        positions, [words[i] for i in positions], fontsize=8, **rotation
    )


@torch.no_grad()
def trace(
    model: nn.Module,
    text: str | Tensor | Sequence[int],
    *,
    tokenizer: Any = None,
    layer: int | str = 0,
    tokens: Sequence[str] | None = None,
) -> Trace:
    """Read a layer's memory after each token at the keys of all tokens so far.

    Works for every recipe that `rc.read` reads. A text of T tokens takes T calls of `rc.recall`
    and T of `rc.read`.

    Args:
        model: a `MemoryLayer`, or a model or composition that has some.
        text: tokens ``[1, T, d_model]`` of a layer or composition; of a language model a text, or
            token ids ``[T]`` or ``[1, T]``.
        tokenizer: tokenizer of the model, for a text, and for the words of token ids.
        layer: index of a `MemoryLayer` among those of the model, or its name.
        tokens: T words; by default those of the tokenizer, or numbers from 0.

    Raises:
        ValueError: an input that does not fit, several sequences, or too many tokens.
        RecipeError: no memory that can be read token by token.

    Examples:
        >>> layer = rc.zoo.get("softmax_attention").build(d_model=8, num_heads=2)
        >>> result = rc.trace(layer, torch.randn(1, 4, 8), tokens="the cat the dog".split())
        >>> result.plot("attention").save("trace")[0].name
        'trace.png'
    """
    if not isinstance(model, nn.Module):
        raise RecipeError(f"rc.trace takes a layer or a model, not {type(model).__name__}")
    if isinstance(model, MemoryLayer):
        memory, name, x = model, "", text
        if not isinstance(x, Tensor):
            raise ValueError(
                f"the input of a layer is a tensor [1, T, {model.d_model}], not "
                f"{type(x).__name__}: give a text to a language model"
            )
    else:
        memory, name = _memory_of(model, layer)
        inputs = _inputs(model, text, tokenizer)
        if tokens is None and tokenizer is not None and not inputs.is_floating_point():
            tokens = [token_label(tokenizer.decode([i])) for i in inputs[0].tolist()]
        x = _received(model, memory, name, inputs)
    check_tokens(x, None, None, d_model=memory.d_model, weight=memory.qkv.weight)
    B, T, n = x.shape[0], x.shape[1], memory.recipe.associations_per_token
    if B != 1 or not T:
        raise ValueError(f"rc.trace takes one sequence [1, T, ...] with T ≥ 1, not {list(x.shape)}")
    if n * T > MAX_ASSOCIATIONS:
        raise ValueError(
            f"rc.trace takes at most {MAX_ASSOCIATIONS} associations, and {T} tokens have {n * T}: "
            "give a shorter text"
        )
    words = [str(t) for t in range(T)] if tokens is None else [*tokens]
    if len(words) != T:
        raise ValueError(f"tokens must be {T} words, one per token, not {len(words)}")
    cosine, error = read_back(MemoryRun(memory, x))
    return Trace(
        recipe=memory.recipe,
        layer=name,
        tokens=tuple(words),
        cosine_similarity=cosine,
        relative_error=error,
    )


@torch.no_grad()
def read_back(run: MemoryRun) -> tuple[Tensor, Tensor]:
    """Return cosine similarities and relative errors ``[T, T·n, H]`` of one sequence."""
    recipe = run.spec.recipe
    T, H, n = run.inputs.k.shape[1], run.spec.num_kv_heads, recipe.associations_per_token
    keys, values = (
        tensor.view(1, T, H, n, -1).transpose(2, 3).flatten(1, 2)  # [1, T·n, H, ·]
        for tensor in (run.inputs.k, run.inputs.v)
    )
    retained = {gate.name for gate in recipe.retention.gates()}
    cosine = torch.full((T, T * n, H), torch.nan)
    error = cosine.clone()
    state = None
    for t in range(T):
        count = n * (t + 1)
        _, state = run.recall(slice(t, t + 1), state)
        # The link of the retention is that of token t, the similarity of a query that of token s.
        gates = {
            name: gate[:, t : t + 1].expand(-1, count, *gate.shape[2:])
            if name in retained
            else gate[:, : t + 1].repeat_interleave(n, 1)
            for name, gate in run.inputs.gates.items()
            if name in recipe.read_gates
        }
        y = run.read(keys[:, :count], gates, state)[0].double()  # [n·(t + 1), H, V]
        v = values[0, :count].double()
        length = v.norm(dim=-1)
        similarity = functional.cosine_similarity(y, v, dim=-1).where(length > 0, torch.nan)
        cosine[t, :count] = similarity.float().cpu()
        relative = ((y - v).norm(dim=-1) / length).where(length > 0, torch.nan)
        error[t, :count] = relative.float().cpu()
    return cosine, error


def _memory_of(model: nn.Module, layer: int | str) -> tuple[MemoryLayer, str]:
    """Return a memory layer of a model, and its name."""
    memories = {
        name: module for name, module in model.named_modules() if isinstance(module, MemoryLayer)
    }
    names = [*memories]
    if not names:
        raise RecipeError(f"this {type(model).__name__} has no rc.MemoryLayer to trace")
    if isinstance(layer, int) and 0 <= layer < len(names):
        layer = names[layer]
    if layer not in memories:
        raise ValueError(
            f"layer must be from 0 to {len(names) - 1}, or a name such as {names[0]!r}, not "
            f"{layer!r}"
        )
    return memories[str(layer)], str(layer)


def _inputs(model: nn.Module, text: str | Tensor | Sequence[int], tokenizer: Any) -> Tensor:
    """Return the input of a model: vectors, or ids ``[1, T]`` on the device of the model."""
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("a text needs its tokenizer: give tokenizer=..., or token ids [1, T]")
        words: list[int] = tokenizer(text)["input_ids"]
        text = words
    ids = model_inputs(model, text)
    if not ids.is_floating_point() and ids.shape[0] != 1:
        raise ValueError(f"token ids must have shape [T] or [1, T] with T ≥ 1, not {[*ids.shape]}")
    return ids


def _received(model: nn.Module, memory: MemoryLayer, name: str, inputs: Tensor) -> Tensor:
    """Return the tokens that a layer receives when the model reads the inputs."""
    with received_tokens({name: memory}) as calls:
        model(inputs)
    if calls[name] and (calls[name][0].shape[1] or not inputs.shape[1]):
        return calls[name][0]
    compositions = [
        module
        for path, module in model.named_modules()
        if isinstance(module, MixerLayer) and (not path or name.startswith(f"{path}."))
    ]
    if compositions:
        refuse_composition("rc.trace", compositions[0])
    raise RecipeError(f"{name} is not called for this text, and rc.trace needs one call")


def token_label(text: str) -> str:
    """Return a token as a label, without outer spaces, and with escapes for line breaks."""
    return repr(text.strip(" "))[1:-1] or "␣"
