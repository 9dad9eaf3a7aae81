"""Which recipes and sizes the fused walk is for, and how it is built for them.

The rule is about structure: a chain of two maps with one table of coefficients, an affine error, an
activation whose slope the kernel knows. Sizes decide how many blocks share one memory: each keeps
its part of A and S in the registers of 256 threads, 64 numbers each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect.engines.deep.chain.chain import Chain

if TYPE_CHECKING:
    from recollect.choices.memory.base import LinearMap
    from recollect.recipe.recipe import Recipe

__all__ = ["CURVES", "SIZES", "TOKENS", "Build", "build_of", "misfit", "runs_on"]

CURVES = ("gelu", "gelu_tanh", "silu", "relu")
"""Activations of the kernel, in the order of its macro CURVE."""

SIZES, TOKENS = (64, 128), (16, 32, 64)
"""Channels of keys and values, and tokens of an inner batch, that the kernel has been built for."""

STATE = 256 * 64
"""Numbers of A and S that one block keeps: 64 registers of 256 threads."""

BLOCKS = 16
"""Blocks of a cluster that a Hopper GPU holds; above 8 it is asked to (`launch`)."""

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block of an H100 or H200 may have."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build of the walk.

    Attributes:
        D: channels of keys and values. R: tokens of an inner batch.
        HS: hidden units of a block. CS: blocks that share a memory.
        momentum: whether there is an S. target: whether steps are normalised.
        curve: index in `CURVES`. slope, offset: a and b of the error a·prediction − b·value.
    """

    D: int
    R: int
    HS: int
    CS: int
    momentum: bool
    normalised: bool
    residual: bool
    curve: int
    slope: float
    offset: float

    @property
    def warpgroups(self) -> bool:
        """Whether the walk multiplies by whole warpgroups (wgmma), of 64 tokens."""
        return self.R == 64

    @property
    def _between(self) -> int:
        """Channels between two rows of the walk in shared memory."""
        return 0 if self.warpgroups else 8

    @property
    def shared_bytes(self) -> int:
        """Bytes of the kernel's ``Shared``, which it checks against this count."""
        slots, beside, more = 1 + self.momentum, 8 // (self.R // 16), self._between
        rows, hidden = self.R * (self.D + more), self.R * (self.HS + more)
        lean = self.warpgroups and self.D > 64  # values, C and units at queries lie elsewhere
        halves = 4 * slots * self.HS * (self.D + more) + 4 * rows + 3 * hidden
        halves += 24 if lean else 2 * rows + hidden
        numbers = (2 if self.warpgroups else 4) * self.R * self.D + (4 if lean else self.R**2)
        numbers += 15 * self.R + 8 + 3 * self.R * beside
        return -(-(2 * halves + 4 * numbers) // 16) * 16

    @property
    def back_tokens(self) -> int:
        """Tokens that the way back takes at a time, of which a batch has one or two parts."""
        return min(self.R, 32)

    @property
    def back_bytes(self) -> int:
        """The same of the way back, ``BackShared``."""
        slots, R, beside = 1 + self.momentum, self.back_tokens, 8 // (self.back_tokens // 16)
        rows, hidden = R * (self.D + 8), R * (self.HS + 8)
        halves = (2 * slots + 1) * self.HS * (self.D + 8) + (3 + 2 * slots) * rows + 6 * hidden
        numbers = 3 * R * self.D + R * beside * (1 + slots) + 3 * R + 32
        return -(-(2 * halves + 4 * numbers) // 16) * 16

    @property
    def token_bytes(self) -> int:
        """The same of one decoded token, ``TokenShared``."""
        factors = self.R * (2 * self.D + 4 + 2 * self.HS)
        return 4 * (factors + 4 * self.D + 11 * self.HS + 4 * self.R + 16)

    def arch(self, capability: tuple[int, int]) -> str:
        """What it is compiled for on a device; products of warpgroups are its own architecture's.

        Args:
            capability: the device's compute capability.
        """
        return "sm_{}{}".format(*capability) + ("a" if self.warpgroups else "")

    def macros(self, kernel: str = "walk") -> dict[str, str]:
        """What the source is compiled with.

        Args:
            kernel: ``"walk"``, ``"trace"``, the walk that writes what the way back needs in place
                of reading, or ``"back"``.
        """
        tokens = self.back_tokens if kernel == "back" else self.R
        return {
            "TRACE": str(int(kernel == "trace")),
            "BACK_BYTES": str(self.back_bytes),
            "TOKEN_BYTES": str(self.token_bytes),
            "D": str(self.D),
            "R": str(tokens),
            "PARTS": str(self.R // tokens),
            "HS": str(self.HS),
            "CS": str(self.CS),
            "MOMENTUM": str(int(self.momentum)),
            "NORMALISED": str(int(self.normalised)),
            "RESIDUAL": str(int(self.residual)),
            "CURVE": str(self.curve),
            "ERROR_A": f"({self.slope!r}f)",
            "ERROR_B": f"({self.offset!r}f)",
            "SHARED_BYTES": str(self.shared_bytes),
        }


def misfit(recipe: Recipe, chain: Chain | None) -> str | None:
    """Why the fused walk is not for a recipe, in its structure; ``None`` where it is.

    Args:
        recipe: the regression problem.
        chain: its memory, where that is a chain with one table of coefficients.
    """
    if chain is None:
        return (
            f"{recipe.memory.title} with {recipe.retention.title} and {recipe.algorithm.title} is "
            "no chain of maps with one table of coefficients"
        )
    depth = len(recipe.memory.shapes(SIZES[0], SIZES[0]))
    if depth != 2:
        return f"the memory is a chain of {depth} maps, and the kernel has two"
    if chain.bases:
        return f"{recipe.memory.title} stands beside a base, which the kernel does not read"
    bounded = recipe.memory.bounded and chain.target is not None
    if chain.memory.has_output_map or bounded:
        return f"{recipe.memory.title} ends in more than a residual, which the kernel does not know"
    if chain.activation not in CURVES:
        return f"the kernel has no {chain.activation}, but {', '.join(CURVES)}"
    if chain.bias.affine is None or chain.bias.quantity_axes:
        return f"the error of {chain.bias.title} is not a·prediction − b·value with fixed a and b"
    if recipe.features.lifts:
        return f"{recipe.features.title} lifts keys, and the kernel takes them as they are"
    if recipe.context.horizon != 1:
        return f"{recipe.context.title} writes associations more than once"
    if recipe.algorithm.batch_size not in TOKENS:
        *most, last = map(str, TOKENS)
        many = f"{', '.join(most)} or {last}"
        return (
            f"an inner batch has {recipe.algorithm.batch_size} tokens, and the kernel takes {many} "
            "at a time"
        )
    return None


def build_of(
    recipe: Recipe, chain: Chain, maps: tuple[LinearMap, ...], *, momentum: bool
) -> Build | None:
    """The build for a recipe that fits, at its sizes; ``None`` where they do not fit.

    Args:
        recipe: for which `misfit` says nothing.
        chain: its memory.
        maps: of the memory.
        momentum: whether it has an S.
    """
    assert chain.bias.affine is not None
    D, M = maps[0].in_features, maps[0].out_features
    if D not in SIZES or maps[1].out_features != D:
        return None
    HS = STATE // (2 * (1 + momentum) * D)
    if recipe.algorithm.batch_size > 16:
        HS = min(HS, 64)  # of 128 units and 32 tokens a trace spills
    while M % HS:
        HS //= 2
    CS = M // HS
    if HS < 32 or CS > BLOCKS:
        return None
    build = Build(
        D=D,
        R=recipe.algorithm.batch_size,
        HS=HS,
        CS=CS,
        momentum=momentum,
        normalised=chain.target is not None,
        residual=chain.memory.residual,
        curve=CURVES.index(chain.activation),
        slope=float(chain.bias.affine[0]),
        offset=float(chain.bias.affine[1]),
    )
    most = max(build.shared_bytes, build.back_bytes)
    return build if most <= MOST_SHARED else None


def runs_on(build: Build, capability: tuple[int, int]) -> bool:
    """Whether a device holds a build in its registers and its shared memory, without spilling.

    Blocks share a memory from 9.0 on, 8.0 has one block; only 9.0 has the products of warpgroups
    that batches of 64 tokens are walked by. For 10.0 the assembler of today spills some registers
    of walks without momentum or shares, and those are left out.

    Args:
        build: of the walk.
        capability: the device's compute capability.
    """
    if build.warpgroups:
        return capability == (9, 0)
    if capability == (8, 0):
        most = max(build.shared_bytes, build.back_bytes)
        return build.CS == 1 and most <= 163 * 1024
    return capability == (9, 0) or (capability == (10, 0) and build.momentum and build.normalised)
