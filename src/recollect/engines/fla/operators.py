"""Table of the operators of flash-linear-attention by the structure that they compute."""

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
    """Function of the package and the structures that it computes."""

    name: str  # name of the function
    module: str  # module of the function
    memory: str = "matrix"  # supported `Structure.memory`
    erases: tuple[str, ...] = ("nothing",)  # supported `Structure.erases`
    decays: tuple[str, ...] = ("none", "head")  # supported `Structure.decay`
    decays_first: tuple[bool, ...] = (True, False)  # supported `Structure.decays_first`
    multi_step: bool = False  # whether it reads once after several associations of a token
    reads_before: bool = False  # whether a token reads before it writes, with a bonus
    # Name of the recurrent function for few tokens without a gradient. Its products are float32.
    token: str | None = None
    max_features: int | None = None  # maximum number of key channels
    float32: bool = True  # whether it supports float32, which it multiplies as TF32
    uses_matmul: bool = True  # whether it has matrix products, which have fewer bits than float32
    # values of `Structure.decay` for which its backward pass calls the package's chunk_bwd_dqkwg
    # with a gate (`gated_backward_raises`)
    gated_backward: tuple[str, ...] = ()

    def matches(self, structure: Structure) -> bool:
        """Return whether the operator computes a structure."""
        return (
            structure.memory == self.memory
            and structure.erases in self.erases
            and structure.decay in self.decays
            and structure.decays_first in self.decays_first
            and (not self.multi_step or structure.associations > 1)
            and (
                not self.reads_before
                or (structure.reads_before and structure.bonus and structure.has_unit_rate)
            )
        )

    def supports(self, dtype: torch.dtype, features: int) -> bool:
        """Return whether the operator supports q, k and v of a dtype with these key channels."""
        is_too_wide = self.max_features is not None and features > self.max_features
        return not is_too_wide and (self.float32 or dtype != torch.float32)


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
    # A_t = α_t A_(t−1) (I − β k kᵀ) + β v kᵀ, several steps per token
    Operator(
        name="chunk_gated_delta_product",
        module="fla.ops.gated_delta_product",
        erases=("key",),
        decays_first=(True,),
        multi_step=True,
        max_features=256,
        float32=False,
        gated_backward=("head",),
    ),
    Operator(
        name="chunk_delta_rule",
        module="fla.ops.delta_rule",
        erases=("key",),
        decays=("none",),
        token="fused_recurrent_delta_rule",
        max_features=256,
        float32=False,
    ),
    Operator(
        name="chunk_gated_delta_rule",
        module="fla.ops.gated_delta_rule",
        erases=("key",),
        decays_first=(True,),
        token="fused_recurrent_gated_delta_rule",
        max_features=256,
        gated_backward=("none", "head"),
    ),
    Operator(
        name="chunk_kda",
        module="fla.ops.kda",
        erases=("key",),
        decays=("key", "head", "none"),
        decays_first=(True,),
        token="fused_recurrent_kda",
        max_features=256,
    ),
    # A_t = A_(t−1) (Diag(α_t) + a_t b_tᵀ) + v_t k_tᵀ: the error may precede the decay
    Operator(
        name="chunk_dplr_delta_rule",
        module="fla.ops.generalized_delta_rule",
        erases=("key", "probe"),
        decays=("none", "head", "key"),
        token="fused_recurrent_dplr_delta_rule",
        max_features=256,
    ),
    # h_t = α_t ⊙ h_(t−1) + x_t; the chunked version has no gradient of the initial state
    Operator(
        name="fused_recurrent_hgrn",
        module="fla.ops.hgrn",
        memory="vector",
        decays=("none", "value"),
        uses_matmul=False,
    ),
    # (Σ γ w k kᵀ + Λ)⁻¹ by conjugate gradients
    Operator(
        name="chunk_mesa_net",
        module="fla.ops.mesa_net",
        memory="ridge",
        erases=("key",),
        max_features=128,
    ),
    # softmax(⟨q_t, k_i⟩ + Σ log α) v
    Operator(
        name="parallel_forgetting_attn",
        module="fla.ops.forgetting_attn",
        memory="mean",
        decays=("head",),
        max_features=256,
    ),
)  # fmt: skip


def operators(structure: Structure) -> Iterator[Operator]:
    """Return the operators that compute a structure, the most specific first."""
    return (operator for operator in OPERATORS if operator.matches(structure))


@cache
def installed() -> bool:
    """Return whether the package and Triton are installed, without importing them."""
    return find_spec("fla") is not None and find_spec("triton") is not None


AFFECTED = "a Hopper GPU with Triton 3.4 to 3.7.0"
"""Devices for which `gated_backward_raises` is True."""


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
    """Return a function of the package; import it on the first call."""
    return getattr(import_module(module), name)
