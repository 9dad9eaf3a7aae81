"""Base classes of memories: functions of weights, and stacks of linear maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from recollect.choices.fields import option, quantity
from recollect.choices.member import Member, RecipeError, member
from recollect.choices.trial import check_forward

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["LinearMap", "Memory", "Read", "Stack"]


Apply = Callable[[int, Tensor], Tensor]


Forward = Callable[[Sequence[Tensor], Tensor, Tensor, Mapping[str, Tensor]], Tensor]


@member
class Read(Member):
    """How a memory is read.

    Over finite features this is for memories that are linear in their weights. Over kernels,
    ``normalize="sum"`` divides what every map reads from the features by Σ_i κ(z_i, x) over the
    keys it holds: a softmax, in which each weighs 1 (decayed like the memory), whatever its rate.
    What is written is not divided: such a map moves by δ φ(k)ᵀ, δ the gradient of what it gives,
    as in attention. `docs/design/kernel-delta.md` says why that is not δ φ(k)ᵀ / Σ_i κ(z_i, k).

    Args:
        normalize: ``"none"``: y = W φ(q). ``"sum"``: divided by n·φ(q), n the dot-product memory of
            ones with the same rates (0 where that is 0). ``"floor"``: divided by
            max(|n·φ(q)|, 1), mLSTM's floor, which is exp(−m) in its stabilised scale.
        when: ``"after"`` the token's write, or ``"before"`` it (RWKV-6).
        bonus: adds ⟨φ(q), u ⊙ φ(k)⟩ v of the current token; a constant or ``"static"``, one u per
            head and channel.

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
    bonus: float | str = quantity(0.0, axes=("F",), kinds=("static",), init=0.5)

    @property
    def plain(self) -> bool:
        """Whether this is y_t = W_t φ(q_t) and nothing else."""
        return self == Read()


_AXES = ("K", "V", "F", "in", "out", "b", "n", "c", "J")
"""Symbolic axes whose sizes a recipe says."""


class Memory(Member):
    """The function M(W; x) that stores associations in its weights W.

    Its numbers are learned tensors: params, or quantities given as ``"static"``.

    Attributes:
        linear: whether M(W; x) = W x with one matrix W ``[V, F]`` (w ⊙ x where ``diagonal``), and
            nothing else.
        degree: degree of a local polynomial; ``None`` for a memory with weights.
        channelled: whether decays and rates per channel have a meaning.
        diagonal: whether there is one weight per channel instead of a matrix.
        residual: whether the raw key or query is added to the prediction, which needs K = V.
        bounded: whether predictions are of bounded length, as under a norm, so that a value may lie
            beyond all of them: `reachable` then says what of it can be corrected.

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
        >>> y, state = rc.recall(recipe, q, k, v, init=[torch.randn(2, 8, 8)])
        >>> y.shape  # [B, T, H, V]
        torch.Size([1, 4, 2, 8])
    """

    choice = "memory"

    linear: bool = False
    degree: int | None = None
    channelled: bool = False
    diagonal: bool = False
    residual: bool = False
    bounded: bool = False
    read: Read = Read()

    @property
    def needs_init(self) -> bool:
        """Whether a memory whose weights are all zero would never learn."""
        return not self.linear

    def __post_init__(self) -> None:
        super().__post_init__()
        self._handed_params("forward")
        if type(self).forward is not Memory.forward and (wrong := check_forward(self)):
            raise RecipeError(wrong)
        if self.bounded and type(self).reachable is Memory.reachable:
            raise RecipeError(
                f"{self.title} says bounded, so that a value may lie beyond all that it says, and "
                "not what of one it can say: define reachable, or leave bounded out"
            )

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.linear and self.shapes(2, 2) != (((2,),) if self.diagonal else ((2, 2),)):
            yield (
                f"{self.title} says linear, which is M(W; x) = W x with one matrix [V, F], and its "
                "weights are of other shapes: leave linear out"
            )
        known = (*_AXES, *recipe.features.axes(4), *self.axes(4, 4, 4))
        for param in self.params():
            for axis in (*param.axes, *filter(None, (param.fan,))):
                if axis not in known:
                    yield (
                        f"the param {param.name!r} of {param.owner} has the axis {axis!r}, whose "
                        f"size nobody says: return it from {self.title}.axes(K, F, V), or name one "
                        f"of {', '.join(known)}"
                    )

    def axes(self, K: int, F: int, V: int) -> dict[str, int]:
        """Sizes of symbolic axes of its own params, by name.

        Args:
            K: key channels.
            F: input features.
            V: outputs.
        """
        return {}

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the weights (without ``[B, H]``) for F input features and V outputs.

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
        """M(W; x): weights ``[B, H, *shape]``, x ``[B, H, N, F]``, raw ``[B, H, N, K]`` → V.

        ``raw`` is the key or query before features; ``params`` are this memory's own, each
        ``[H, ...]``.

        Args:
            weights: one tensor ``[B, H, *shape]`` per entry of `shapes`.
            x: lifted keys or queries ``[B, H, N, F]``.
            raw: the same before features, ``[B, H, N, K]``.
            params: this memory's own learned tensors by name, each ``[H, ...]``.

        Raises:
            NotImplementedError: a memory that keeps associations instead of weights.
        """
        raise NotImplementedError(f"{self.title} has no weights")

    def reachable(self, value: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """What of a value a `bounded` memory can say: what normalised steps correct an error to.

        Args:
            value: ``[B, H, N, V]``.
            raw: keys before features, ``[B, H, N, K]``.
            params: this memory's own learned tensors by name, each ``[H, ...]``.
        """
        return value

    def within(self, value: str, raw: str) -> str:
        """How `reachable` is written in an equation.

        Args:
            value: how the value is written.
            raw: how the key is.
        """
        return f"what {self.brief} can say of {value}"

    def function(self, F: int, V: int) -> Forward:
        """`forward`, bound to its sizes; overridden where the structure depends on them.

        Args:
            F: input features.
            V: outputs.
        """
        return self.forward

    def basis(self, difference: Tensor) -> Tensor:
        """Monomials of k − q that a local polynomial is made of, ``[..., K]`` to ``[..., D]``."""
        raise NotImplementedError(f"{self.title} is no local polynomial")

    letter: str = "W"
    """What its weights are called in an equation."""

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        """How M(W; x) is written in an equation.

        Args:
            x: the lifted key or query.
            raw: the same before features, where they differ.
            W: what stands for the weights, e.g. ``"α_t W_(t−1)"``; their letter when omitted.
        """
        return f"M({W or self.letter}; {x})"

    def outer(self, error: str, x: str) -> str | None:
        """How ∂⟨error, M(W; x)⟩/∂W is written; ``None`` where that is no short product.

        Args:
            error: how the error is written.
            x: how the lifted key is written.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class LinearMap:
    """One linear map of a `Stack`: ``[out, in]``, and where it stands.

    Attributes:
        first: its input is the features; ``last``: its output is the prediction.
        bias: its last input column multiplies a constant 1.

    Examples:
        >>> first, last = rc.memory.MLP(depth=2, expansion=4).maps(8, 8)
        >>> first.name, first.inp, first.out
        ('W2', 8, 32)
        >>> last.first, last.last
        (False, True)
    """

    name: str
    out: int
    inp: int
    first: bool
    last: bool
    bias: bool = False


class Stack(Memory):
    """A memory made of linear maps, activations, norms and a residual.

    Attributes:
        bases: names of the params ``[H, out, in]`` that are added to the maps, in the order of
            `maps`: learned weights that are no memory. None by default.
        fixed_products: whether the program has products of such weights beside those of the maps,
            which a cost counts too.

    Examples:
        >>> memory = rc.memory.MLP(depth=3, expansion=2)
        >>> isinstance(memory, rc.memory.Stack)
        True
        >>> [(one.name, one.out, one.inp) for one in memory.maps(4, 4)]
        [('W3', 8, 4), ('W2', 8, 8), ('W1', 4, 8)]
    """

    channelled = True

    @property
    def bases(self) -> tuple[str, ...]:
        return ()

    @property
    def fixed_products(self) -> bool:
        return bool(self.bases)

    @property
    def chain(self) -> str | None:
        """The activation between maps that follow one another, and `finish` after the last.

        Only `bases` may be added to the maps. ``None`` for any other program.
        """
        return None

    def finish(self, z: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """M(x) from what the last map of a `chain` says: z, or z + k with a residual.

        Every token is treated alike and alone, and the key enters as a residual or not at all.

        Args:
            z: what it says, ``[B, H, N, V]``, where B may count inner batches too.
            raw: keys or queries before features, ``[B, H, N, K]``.
            params: this memory's own learned tensors by name, each ``[H, ...]``.
        """
        return raw + z if self.residual else z

    @property
    def last_norm(self) -> str | None:
        """``"layer"`` where `finish` is w ⊙ LN(z) + b, and + k with a residual.

        w and b are then the params ``norm_weight`` and ``norm_bias``, each ``[H, V]``. ``None`` for
        anything else.
        """
        return None

    @property
    def finishes(self) -> bool:
        """Whether `finish` is more than a residual."""
        return type(self).finish is not Stack.finish

    @property
    def biases(self) -> bool:
        """Whether a map has a column for a constant 1."""
        return any(one.bias for one in self.maps(1, 1))

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        """The linear maps in order of application.

        Args:
            F: input features.
            V: outputs.

        Raises:
            NotImplementedError: a subclass that does not state its maps.
        """
        raise NotImplementedError(f"{self.title} must state its maps")

    def program(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """M(x), calling ``apply(l, h)`` for the l-th linear map on ``h [B, H, N, in]``.

        Args:
            apply: ``apply(l, h)`` is the l-th map of `maps` on ``h [B, H, N, in]``.
            x: lifted keys or queries ``[B, H, N, F]``.
            raw: the same before features, ``[B, H, N, K]``.
            params: this memory's own learned tensors by name, each ``[H, ...]``.

        Raises:
            NotImplementedError: a subclass that does not state its program.
        """
        raise NotImplementedError(f"{self.title} must state its program")

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        return tuple((m.out, m.inp) for m in self.maps(F, V))

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
    ) -> Tensor:
        def apply(index: int, h: Tensor) -> Tensor:
            return h @ weights[index].transpose(-1, -2)

        return self.program(apply, x, raw, params)
