"""Base classes of memories: functions of weights, and stacks of linear maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect.choices.member import Member, member
from recollect.choices.overrides import check_override, check_shape
from recollect.fields import flag, option, quantity
from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["LinearMap", "Memory", "Read", "Stack"]


Apply = Callable[[int, Tensor], Tensor]


Forward = Callable[[Sequence[Tensor], Tensor, Tensor, Mapping[str, Tensor]], Tensor]


@member
class Read(Member):
    """How a memory is read.

    Over finite features, a normaliser needs a memory that is linear in its weights. Over kernels,
    ``normalize="sum"`` divides the output of every map that reads features by Σ_i κ(z_i, x) over
    its stored keys. This is a softmax in which each key has weight 1, decayed like the memory and
    independent of its step size. Writes are not divided: such a map changes by δ φ(k)ᵀ with δ the
    gradient of its output, as in attention. `docs/design/kernel-delta.md` explains why the change
    is not δ φ(k)ᵀ / Σ_i κ(z_i, k).

    Args:
        normalize: ``"none"``: y = W φ(q). ``"sum"``: divided by n·φ(q), with n the dot-product
            memory of ones with the same gates (0 if n·φ(q) is 0). ``"floor"``: divided by
            max(|n·φ(q)|, 1), mLSTM's floor, which is exp(−m) in its stabilised scale.
        when: ``"after"`` the token's write, or ``"before"`` it (RWKV-6).
        bonus: factor u of ⟨φ(q), u ⊙ φ(k)⟩ v, which is added for the current token: a constant, or
            ``"learned"`` per head and channel.
        transposed: whether the query is compared with values and the output is a sum of keys,
            y = Wᵀ q. It needs ``memory.Matrix``, keys without features, and K = V.

    Examples:
        >>> read = rc.memory.Read(normalize="sum")  # linear attention with its denominator
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.Matrix(read=read),
        ...     features=rc.features.EluPlusOne(),
        ...     bias=rc.bias.DotProduct(),
        ...     algorithm=rc.algorithm.GradientDescent(lr=1.0),
        ... )
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, _ = rc.recall(recipe, q, k, torch.ones_like(v))
        >>> torch.allclose(y, torch.ones_like(y))  # a mean of ones
        True
    """

    choice = "read"

    normalize: str = option("none", "sum", "floor")
    when: str = option("after", "before")
    bonus: float | str = quantity(0.0, axes=("F",), sources=("learned",), init=0.5)
    transposed: bool = flag(False)

    @property
    def plain(self) -> bool:
        """Whether this is y_t = W_t φ(q_t), without a normaliser, bonus or transposition."""
        return self == Read()


_AXES = ("K", "V", "F", "in", "out", "b", "n", "c", "J")
"""Symbolic axes with sizes from the recipe."""


class Memory(Member):
    """The function M(W; x) that stores associations in its weights W.

    Its quantities are learned tensors: params, or fields set to ``"learned"``.

    Attributes:
        linear: whether M(W; x) = W x with one matrix W ``[V, F]`` (w ⊙ x if ``is_elementwise``).
        degree: degree of a local polynomial; ``None`` for a memory with weights.
        slope_gate: gate of the query that replaces the solution of a linear fit; ``None`` if the
            slopes of a local polynomial are fitted.
        has_channels: whether decays and learning rates per channel apply.
        is_elementwise: whether there is one weight per channel instead of a matrix.
        residual: whether the raw key or query is added to the prediction, which needs K = V.
        bounded: whether outputs have bounded length, as after a norm. `nearest_output` then gives
            the target of normalised steps.

    Examples:
        >>> @rc.member
        ... class Sine(rc.memory.Memory):  # M(x) = sin(W x)
        ...     def shapes(self, F, V):
        ...         return ((V, F),)
        ...
        ...     def forward(self, weights, x, raw, params):
        ...         return torch.sin(x @ weights[0].mT)
        >>> recipe = rc.Recipe(memory=Sine(), algorithm=rc.algorithm.GradientDescent(lr=0.1))
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, state = rc.recall(recipe, q, k, v, initial_memory=[torch.randn(2, 8, 8)])
        >>> y.shape  # [B, T, H, V]
        torch.Size([1, 4, 2, 8])
    """

    choice = "memory"

    linear: bool = False
    degree: int | None = None
    slope_gate: str | None = None
    has_channels: bool = False
    is_elementwise: bool = False
    residual: bool = False
    bounded: bool = False
    read: Read = Read()

    @property
    def needs_init(self) -> bool:
        """Whether a memory with zero weights would never learn."""
        return not self.linear

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_override(cls, "forward", "weights, x, raw, params")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.degree is None:
            self._require_params_only("forward")
        if self.bounded and type(self).nearest_output is Memory.nearest_output:
            raise RecipeError(
                f"{self.title} is declared bounded and has no nearest_output for values that it "
                "cannot output: define nearest_output, or leave bounded out"
            )

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.linear and self.shapes(2, 2) != (((2,),) if self.is_elementwise else ((2, 2),)):
            yield (
                f"{self.title} is declared linear, M(W; x) = W x with one matrix [V, F], and its "
                "weights have other shapes: leave linear out"
            )
        known = (*_AXES, *recipe.features.axes(4), *self.axes(4, 4, 4))
        for param in self.params():
            for axis in (*param.axes, *filter(None, (param.fan,))):
                if axis not in known:
                    yield (
                        f"the param {param.name!r} of {param.owner} has the axis {axis!r} of "
                        f"unknown size: return its size from {self.title}.axes(K, F, V), or use "
                        f"one of {', '.join(known)}"
                    )

    def axes(self, K: int, F: int, V: int) -> dict[str, int]:
        """Return sizes of additional symbolic axes by name, for params of this memory.

        Args:
            K: key channels.
            F: input features.
            V: outputs.
        """
        return {}

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the weights (without ``[B, H]``).

        Args:
            F: input features.
            V: outputs.

        Raises:
            NotImplementedError: a memory that keeps associations instead of weights.
            RecipeError: sizes that the memory cannot have.
        """
        raise NotImplementedError(f"{self.title} has no weights")

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
    ) -> Tensor:
        """Return M(W; x) as ``[B, H, N, V]``.

        Args:
            weights: one tensor ``[B, H, *shape]`` per entry of `shapes`.
            x: features of the keys or queries ``[B, H, N, F]``.
            raw: keys or queries before features, ``[B, H, N, K]``.
            params: learned tensors of this memory by name, each ``[H, ...]``.

        Raises:
            NotImplementedError: a memory that keeps associations instead of weights.
        """
        raise NotImplementedError(f"{self.title} has no weights")

    def nearest_output(self, value: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Return the closest output to a value that a `bounded` memory can produce.

        It is the target of normalised steps.

        Args:
            value: ``[B, H, N, V]``.
            raw: keys before features, ``[B, H, N, K]``.
            params: learned tensors of this memory by name, each ``[H, ...]``.
        """
        return value

    def nearest_output_text(self, value: str, raw: str) -> str:
        """Return `nearest_output` as text for an equation.

        Args:
            value: text of the value.
            raw: text of the key.
        """
        return f"the output of {self.brief} nearest to {value}"

    def bind(self, F: int, V: int) -> Forward:
        """Return `forward` for these sizes; override it if the structure depends on them.

        Args:
            F: input features.
            V: outputs.
        """
        title = f"{self.title}.forward"

        def checked(
            weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
        ) -> Tensor:
            y = self.forward(weights, x, raw, params)
            return check_shape(title, y, (*x.shape[:-1], V), "a tensor [B, H, N, V]")

        return checked

    def basis(self, difference: Tensor) -> Tensor:
        """Return the monomials of k − q of a local polynomial, ``[..., K]`` to ``[..., D]``."""
        raise NotImplementedError(f"{self.title} is not a local polynomial")

    weight_symbol: str = "W"
    """Symbol of the weights in an equation."""

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        """Return M(W; x) as text for an equation.

        Args:
            x: text of the features of the key or query.
            raw: text of the key or query before features, if it differs.
            W: text of the weights, e.g. ``"α_t W_(t−1)"``; their symbol by default.
        """
        return f"M({W or self.weight_symbol}; {x})"

    def gradient_text(self, error: str, x: str) -> str | None:
        """Return ∂⟨error, M(W; x)⟩/∂W as text for an equation; ``None`` if it is not short.

        Args:
            error: text of the error.
            x: text of the features of the key.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class LinearMap:
    """One linear map of a `Stack`, with weights ``[out, in]``.

    Attributes:
        name: symbol of the weights.
        out_features: number of outputs.
        in_features: number of inputs.
        reads_features: whether the input is the features of the key or query.
        is_output: whether the output is the prediction.
        bias: whether the last input column multiplies a constant 1.

    Examples:
        >>> first, last = rc.memory.MLP(depth=2, expansion=4).maps(8, 8)
        >>> first.name, first.in_features, first.out_features
        ('W2', 8, 32)
        >>> last.reads_features, last.is_output
        (False, True)
    """

    name: str
    out_features: int
    in_features: int
    reads_features: bool
    is_output: bool
    bias: bool = False


class Stack(Memory):
    """A memory made of linear maps, activations, norms and a residual.

    Attributes:
        base_params: names of the params ``[H, out, in]`` that are added to the maps, in the order
            of `maps`: learned weights outside the memory. Empty by default.
        has_base_matmuls: whether the program multiplies by these weights separately, for the cost.

    Examples:
        >>> memory = rc.memory.MLP(depth=3, expansion=2)
        >>> isinstance(memory, rc.memory.Stack)
        True
        >>> [(m.name, m.out_features, m.in_features) for m in memory.maps(4, 4)]
        [('W3', 8, 4), ('W2', 8, 8), ('W1', 4, 8)]
    """

    has_channels = True

    @property
    def base_params(self) -> tuple[str, ...]:
        return ()

    @property
    def has_base_matmuls(self) -> bool:
        return bool(self.base_params)

    @property
    def chain_activation(self) -> str | None:
        """Activation of a chain: linear maps, activations between them, and a last `output_map`.

        Inputs of a map with a `bias` get a constant 1, and only `base_params` may be added to the
        maps. ``None`` for any other program.
        """
        return None

    def output_map(self, z: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Return M(x) from the output z of the last map of a chain: z, or z + k with a residual.

        The result for a token depends only on this token, and on the key only as a residual.

        Args:
            z: output of the last map ``[B, H, N, V]``; B may include inner batches.
            raw: keys or queries before features, ``[B, H, N, K]``.
            params: learned tensors of this memory by name, each ``[H, ...]``.
        """
        return raw + z if self.residual else z

    @property
    def output_norm(self) -> str | None:
        """``"layer"`` if `output_map` is w ⊙ LN(z) + b, plus k with a residual; else ``None``.

        w and b are the params ``norm_weight`` and ``norm_bias``, each ``[H, V]``.
        """
        return None

    @property
    def has_output_map(self) -> bool:
        """Whether `output_map` is more than a residual."""
        return type(self).output_map is not Stack.output_map

    @property
    def bias(self) -> bool:
        """Whether a map has a column for a constant 1."""
        return any(m.bias for m in self.maps(1, 1))

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        """Return the linear maps in order of application.

        Args:
            F: input features.
            V: outputs.

        Raises:
            NotImplementedError: a subclass that does not define its maps.
        """
        raise NotImplementedError(f"{self.title} must define maps(F, V)")

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Return M(x) as a program over the linear maps.

        Args:
            apply: ``apply(l, h)`` is the l-th map of `maps` on ``h [B, H, N, in]``.
            x: features of the keys or queries ``[B, H, N, F]``.
            raw: keys or queries before features, ``[B, H, N, K]``.
            params: learned tensors of this memory by name, each ``[H, ...]``.

        Raises:
            NotImplementedError: a subclass that does not define its program.
        """
        raise NotImplementedError(f"{self.title} must define compute(apply, x, raw, params)")

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        return tuple((m.out_features, m.in_features) for m in self.maps(F, V))

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
    ) -> Tensor:
        def apply(index: int, h: Tensor) -> Tensor:
            return h @ weights[index].transpose(-1, -2)

        return self.compute(apply, x, raw, params)
