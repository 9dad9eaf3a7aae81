"""One table: from a recipe's structure to what of flash-linear-attention computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.torch_version import TorchVersion

from recollect.engines.fla.structure import Structure

__all__ = [
    "AFFECTED",
    "OPERATORS",
    "PACKAGE",
    "Operator",
    "function",
    "gated_backward_raises",
    "installed",
    "operators",
]

PACKAGE = "flash-linear-attention"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A function of the package, and the structures it computes.

    Attributes:
        name, module: of the function.
        memory: `Structure.memory`.
        erases, decays, before: the values of `Structure` that it takes.
        several: whether it reads once after several associations of a token.
        reads_before: whether a token reads before it writes, with a bonus of its own.
        token: the function for a few tokens without a gradient, which multiplies in float32.
        widest: most key channels.
        float32: whether it takes float32, which it multiplies as TF32.
        multiplies: whether it has matrix products, which have fewer bits than float32.
        gated_backward: the values of `Structure.decay` for which its backward pass calls the
            package's ``chunk_bwd_dqkwg`` with a gate (`gated_backward_raises`).
    """

    name: str
    module: str
    memory: str = "matrix"
    erases: tuple[str, ...] = ("nothing",)
    decays: tuple[str, ...] = ("none", "head")
    before: tuple[bool, ...] = (True, False)
    several: bool = False
    reads_before: bool = False
    token: str | None = None
    widest: int | None = None
    float32: bool = True
    multiplies: bool = True
    gated_backward: tuple[str, ...] = ()

    def covers(self, what: Structure) -> bool:
        """Whether this is the recurrence of a structure, or can be made of it."""
        return (
            what.memory == self.memory
            and what.erases in self.erases
            and what.decay in self.decays
            and what.before in self.before
            and (not self.several or what.associations > 1)
            and (not self.reads_before or (what.reads_before and what.bonus and what.writes_values))
        )

    def takes(self, dtype: torch.dtype, features: int) -> bool:
        """Whether it takes keys of a type and a size.

        Args:
            dtype: of q, k and v.
            features: key channels.
        """
        wide = self.widest is not None and features > self.widest
        return not wide and (self.float32 or dtype != torch.float32)


OPERATORS: tuple[Operator, ...] = (
    # A_t = α_t A_(t−1) + v_t k_tᵀ
    Operator(
        name="chunk_simple_gla",
        module="fla.ops.simple_gla",
        token="fused_recurrent_simple_gla",
        gated_backward=("head",),
    ),
    # A_t = A_(t−1) Diag(α_t) + v_t k_tᵀ, read before the write and with a bonus
    Operator(
        name="chunk_rwkv6",
        module="fla.ops.rwkv6",
        decays=("key",),
        reads_before=True,
        token="fused_recurrent_rwkv6",
    ),
    Operator(
        name="chunk_gla",
        module="fla.ops.gla",
        decays=("key", "head"),
        token="fused_recurrent_gla",
    ),
    # A_t = α_t A_(t−1) (I − β k kᵀ) + β v kᵀ, several times a token
    Operator(
        name="chunk_gated_delta_product",
        module="fla.ops.gated_delta_product",
        erases=("key",),
        before=(True,),
        several=True,
        widest=256,
        float32=False,
        gated_backward=("head",),
    ),
    Operator(
        name="chunk_delta_rule",
        module="fla.ops.delta_rule",
        erases=("key",),
        decays=("none",),
        token="fused_recurrent_delta_rule",
        widest=256,
        float32=False,
    ),
    Operator(
        name="chunk_gated_delta_rule",
        module="fla.ops.gated_delta_rule",
        erases=("key",),
        before=(True,),
        token="fused_recurrent_gated_delta_rule",
        widest=256,
        gated_backward=("none", "head"),
    ),
    Operator(
        name="chunk_kda",
        module="fla.ops.kda",
        erases=("key",),
        decays=("key", "head", "none"),
        before=(True,),
        token="fused_recurrent_kda",
        widest=256,
    ),
    # A_t = A_(t−1) (Diag(α_t) + a_t b_tᵀ) + v_t k_tᵀ: the error may see what has not decayed
    Operator(
        name="chunk_dplr_delta_rule",
        module="fla.ops.generalized_delta_rule",
        erases=("key", "probe"),
        decays=("none", "head", "key"),
        token="fused_recurrent_dplr_delta_rule",
        widest=256,
    ),
    # h_t = α_t ⊙ h_(t−1) + x_t; its chunked twin gives the initial state no gradient
    Operator(
        name="fused_recurrent_hgrn",
        module="fla.ops.hgrn",
        memory="vector",
        decays=("none", "value"),
        multiplies=False,
    ),
    # (Σ γ w k kᵀ + Λ)⁻¹ by conjugate gradients
    Operator(
        name="chunk_mesa_net",
        module="fla.ops.mesa_net",
        memory="ridge",
        erases=("key",),
        widest=128,
    ),
    # softmax(⟨q_t, k_i⟩ + Σ log α) v
    Operator(
        name="parallel_forgetting_attn",
        module="fla.ops.forgetting_attn",
        memory="mean",
        decays=("head",),
        widest=256,
    ),
)  # fmt: skip


def operators(what: Structure) -> Iterator[Operator]:
    """Those that compute a structure, the closest first.

    Args:
        what: the structure.
    """
    return (operator for operator in OPERATORS if operator.covers(what))


@cache
def installed() -> bool:
    """Whether the package and the compiler it needs are there; neither is imported."""
    return find_spec("fla") is not None and find_spec("triton") is not None


AFFECTED = "a Hopper GPU with Triton 3.4 to 3.7.0"
"""Devices of which `gated_backward_raises` is True."""


@cache
def gated_backward_raises() -> bool:
    """Return whether the package's ``chunk_bwd_dqkwg`` raises for a gate on this machine.

    Triton 3.4 to 3.7.0 compiles that kernel wrongly for Hopper GPUs (issue 640 of the package). An
    installed tilelang replaces the kernel, but not for `chunk_simple_gla` in 16 bits and not
    without nvcc, so it makes no difference here.
    """
    if torch.version.hip is not None:
        return False
    devices = range(torch.cuda.device_count())
    if not any(torch.cuda.get_device_capability(device)[0] == 9 for device in devices):
        return False
    triton = TorchVersion(import_module("triton").__version__)
    return TorchVersion("3.4.0") <= triton < TorchVersion("3.7.1")


@cache
def function(module: str, name: str) -> Callable[..., Any]:
    """A function of the package, imported when it is first called.

    Args:
        module: where it is.
        name: what it is called there.
    """
    return getattr(import_module(module), name)
