"""Small models for tasks: an embedding, memory layers and a linear read-out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.base import Probe
from recollect.choices.bias.losses import L2
from recollect.choices.features.base import Kernel
from recollect.choices.features.kernels import Exponential
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.functional.recall import recall
from recollect.layer.block import SwiGLU
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe

__all__ = [
    "LEARNED_GATES",
    "PLAIN_LAYER",
    "LayerFunction",
    "RecallModel",
    "TaskModel",
    "delta_former_recipe",
    "memory_layer",
    "with_short_conv",
]

M = TypeVar("M", bound=Mixer)

LayerFunction = Callable[[int], nn.Module]
"""Function from the width of a model to a layer."""

PLAIN_LAYER = LayerOptions(
    conv_size=0,
    conv_activation="none",
    qk_norm="none",
    output_norm="none",
    output_gate="none",
)
"""A layer of projections and the memory, without convolution, norm, position or gate."""

LEARNED_GATES = {
    name: GateOptions(source="learned", activation="softplus", init=1.0) for name in ("lr", "erase")
}
"""α and β of the listing in the AM paper: one learned number each, initially 1."""


def memory_layer(
    recipe: Recipe,
    options: LayerOptions = PLAIN_LAYER,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> LayerFunction:
    """Return a function from the width of a model to a `MemoryLayer` with these arguments."""
    return partial(
        MemoryLayer,
        num_heads=num_heads,
        recipe=recipe,
        options=options,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def with_short_conv(mixer: M) -> M:
    """Return the mixer with a short convolution in every recipe that has none.

    Recall benchmarks such as zoology give every model a short convolution.
    """

    def change(leaf: RecipeMixer) -> RecipeMixer:
        size = leaf.options.conv_size or 4
        return replace(leaf, options=replace(leaf.options, conv_size=size))

    return mixer.map_leaves(change)  # type: ignore[return-value]


class TaskModel(nn.Module):
    """Layers with residual connections between an embedding and a linear read-out.

    If ``unpacked``, that number of positions is decoded from the output of the last token, each by
    an MLP of that output and an embedding of the position (the decoder of MAD's compression task).
    """

    def __init__(
        self,
        inputs: int,  # number of tokens, or of input channels if `vectors`
        classes: int,
        width: int,
        layers: Sequence[LayerFunction],
        *,
        mlp: int = 0,  # hidden width of the SwiGLU after each layer, 0 for none
        norm: bool = False,  # whether layers and read-out have an RMS norm before them
        vectors: bool = False,  # whether inputs are vectors [B, T, inputs], not tokens [B, T]
        unpacked: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width) if vectors else nn.Embedding(inputs, width)
        self.layers = nn.ModuleList(layer(width) for layer in layers)

        def make_norm() -> nn.Module:
            return nn.RMSNorm(width, eps=1e-6) if norm else nn.Identity()

        self.norms = nn.ModuleList(make_norm() for _ in layers)
        self.mlps = nn.ModuleList(
            nn.Sequential(make_norm(), SwiGLU(width, mlp)) for _ in (layers if mlp else ())
        )
        self.unpack = _PositionDecoder(width, unpacked) if unpacked else None
        self.last = make_norm()
        self.read_out = nn.Linear(width, classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits ``[B, T, classes]``."""
        x = self.embed(inputs)
        for index, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = x + layer(norm(x), output_final_state=False)[0]
            if len(self.mlps):
                x = x + self.mlps[index](x)
        if self.unpack is not None:
            x = self.unpack(x[:, -1:])
        return self.read_out(self.last(x))


class _PositionDecoder(nn.Module):
    """Several positions from one vector: h + MLP(RMS(h + p_t)) for every t."""

    def __init__(self, width: int, positions: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(positions, width)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, positions, width]`` for an input ``[B, 1, width]``."""
        return x + self.mlp(self.norm(x + self.positions.weight))


def delta_former_recipe(kernel: Kernel, *, normalize: str = "none", num_heads: int = 1) -> Recipe:
    """Return DeltaFormer with softmax attention and one learned α and β (AM 41–42, 111).

    ``kernel`` is κ₁, normalised over the past if ``normalize="sum"``, with ``num_heads`` w-heads.
    """
    return Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=Exponential(),
        bias=L2(probe=Probe(at="token", kernel=kernel, heads=num_heads, normalize=normalize)),
        algorithm=GradientDescent(),
    )


class RecallModel(nn.Module):
    """One layer of test-time regression with a convolution of keys over two tokens (TTR 56–58).

    k_t = w_0 ⊙ W_K x_t + w_1 ⊙ W_K x_{t−1}, q_t = W_Q x_t, v_t = W_V x_t, logits = W_O RMS(y_t).
    The model has no residual stream, MLP or positions, and the recipe has no gates. Embeddings,
    keys and values have one width d.
    """

    def __init__(self, vocab: int, width: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.embed = nn.Embedding(vocab, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.filter = nn.Parameter(torch.full((2, width), 0.5))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.read_out = nn.Linear(width, vocab, bias=False)
        with torch.no_grad():
            self.project.weight.copy_(torch.eye(width).repeat(3, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, T, vocab]``."""
        q, k, v = self.project(self.embed(tokens)).chunk(3, dim=-1)
        previous = nn.functional.pad(k, (0, 0, 1, 0))[:, :-1]
        k = self.filter[0] * k + self.filter[1] * previous
        y, _ = recall(self.recipe, *(x.unsqueeze(2) for x in (q, k, v)), output_final_state=False)
        return self.read_out(self.norm(y.squeeze(2)))
