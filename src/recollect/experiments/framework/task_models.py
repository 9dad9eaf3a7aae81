"""Small models for tasks: an embedding, memory layers, a read-out; nothing that is not asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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

__all__ = ["BARE", "Mixer", "RecallModel", "TaskModel", "delta_former"]

BARE = LayerOptions(
    conv_size=0,
    conv_activation="none",
    qk_norm="none",
    output_norm="none",
    output_gate="none",
)
"""Projections and the memory: no convolution, norm, position or gate."""


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A memory layer by recipe and options.

    Attributes:
        heads: of queries; kv_heads: memories, as many when ``None``.
        head_dim: K and V, width / heads when ``None``.
    """

    recipe: Recipe
    options: LayerOptions = BARE
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int | None = None


class TaskModel(nn.Module):
    """x + layer(x) for each layer, between an embedding and a linear read-out.

    Args:
        inputs: tokens of the vocabulary, or channels of input vectors when ``vectors``.
        classes: of the read-out.
        width: of the residual stream.
        mixers: the layers.
        mlp: hidden width of a SwiGLU after each layer, 0 for none.
        norm: whether layers and read-out see an RMS norm.
        vectors: whether inputs are vectors ``[B, T, inputs]`` instead of tokens ``[B, T]``.
        unpacked: positions to read from the last token's output alone, each through an MLP of it
            and an embedding of the position (the decoder of MAD's compression task); 0 reads every
            token from its own output.
    """

    def __init__(
        self,
        inputs: int,
        classes: int,
        width: int,
        mixers: Sequence[Mixer],
        *,
        mlp: int = 0,
        norm: bool = False,
        vectors: bool = False,
        unpacked: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width) if vectors else nn.Embedding(inputs, width)
        self.layers = nn.ModuleList(
            MemoryLayer(
                width,
                mixer.heads,
                mixer.recipe,
                mixer.options,
                num_kv_heads=mixer.kv_heads,
                head_dim=mixer.head_dim,
            )
            for mixer in mixers
        )

        def normed() -> nn.Module:
            return nn.RMSNorm(width, eps=1e-6) if norm else nn.Identity()

        self.norms = nn.ModuleList(normed() for _ in mixers)
        self.mlps = nn.ModuleList(
            nn.Sequential(normed(), SwiGLU(width, mlp)) for _ in (mixers if mlp else ())
        )
        self.unpack = _Unpack(width, unpacked) if unpacked else None
        self.last = normed()
        self.read_out = nn.Linear(width, classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, T, classes]``."""
        x = self.embed(inputs)
        for index, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = x + layer(norm(x), output_final_state=False)[0]
            if len(self.mlps):
                x = x + self.mlps[index](x)
        if self.unpack is not None:
            x = self.unpack(x[:, -1:])
        return self.read_out(self.last(x))


class _Unpack(nn.Module):
    """Positions from one vector: h + MLP(RMS(h + p_t)) for every t."""

    def __init__(self, width: int, positions: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(positions, width)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width, 2 * width)

    def forward(self, last: Tensor) -> Tensor:
        """``[B, 1, width]`` to ``[B, positions, width]``."""
        return last + self.mlp(self.norm(last + self.positions.weight))


def delta_former(
    kernel: Kernel,
    *,
    normalize: str = "none",
    heads: int = 1,
    read: Kernel | None = None,
) -> Recipe:
    """DeltaFormer with κ₁ of the erasure, softmax reading and one learned α and β (AM 41–42, 111).

    Args:
        kernel: κ₁. normalize: ``"sum"`` makes it a softmax over the past.
        heads: w-heads.
        read: κ₂, which is read as a softmax when it is the exponential, as by default.
    """
    positive = read is None
    return Recipe(
        memory=Matrix(read=Read(normalize="sum" if positive else "none")),
        features=Exponential() if read is None else read,
        bias=L2(probe=Probe(at="token", kernel=kernel, heads=heads, normalize=normalize)),
        algorithm=GradientDescent(),
    )


LEARNED = {
    name: GateOptions(source="learned", activation="softplus", init=1.0) for name in ("lr", "erase")
}
"""α and β as the paper's listing has them: one learned number each, 1 at the start."""


class RecallModel(nn.Module):
    """One layer of test-time regression and one key convolution over two tokens (TTR 56–58).

    k_t = w_0 ⊙ W_K x_t + w_1 ⊙ W_K x_{t−1}, q_t = W_Q x_t, v_t = W_V x_t, logits = W_O RMS(y_t).
    No residual stream, no MLP, no positions.

    Args:
        vocab: tokens.
        width: d, of embeddings, keys and values.
        recipe: the memory, without gates.
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
            eye = torch.eye(width)
            self.project.weight.copy_(torch.cat([eye, eye, eye]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, vocab]``."""
        q, k, v = self.project(self.embed(tokens)).chunk(3, dim=-1)
        before = nn.functional.pad(k, (0, 0, 1, 0))[:, :-1]
        k = self.filter[0] * k + self.filter[1] * before
        y, _ = recall(self.recipe, *(x.unsqueeze(2) for x in (q, k, v)), output_final_state=False)
        return self.read_out(self.norm(y.squeeze(2)))
