"""Families of the recurrent layers of transformers whose state is in the model's cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect import bias, retention
from recollect.lm.adoption.family import Family, MemoryArguments, loaded, register_family
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.zoo import get

__all__: list[str] = []


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1))


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _normalize(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale x / √(‖x‖² + 1e-6), the norm of queries and keys of these models."""
    x = wide(x)
    return x * (scale * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6))


def has_attributes(module: nn.Module, *names: str) -> bool:
    return all(hasattr(module, name) for name in names)


class GatedDeltaNet(Family):
    """Layers of Qwen3-Next, Qwen3.5, Qwen4, OLMo-Hybrid and LaraMini."""

    name = "gated delta net"
    recipe = Recipe(retention=retention.Decay(when="before"))
    keys_first = True

    def matches(self, module: nn.Module) -> bool:
        return has_attributes(module, "A_log", "dt_bias", "conv1d", "num_v_heads", "head_v_dim")

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if hasattr(module, "in_proj_qkvz"):
            parts = module.fix_query_key_value_ordering(
                module.in_proj_qkvz(x), module.in_proj_ba(x)
            )
            q, k, v, z, b, a = parts
            u = torch.cat([part.flatten(2) for part in (q, k, v)], -1)
        elif hasattr(module, "in_proj_qkv"):
            u = module.in_proj_qkv(x)
            z, b, a = module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
        else:
            u = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
            z, b, a = module.g_proj(x), module.b_proj(x), module.a_proj(x)
        return u, {"z": z, "b": b, "a": a}

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        q, k, v = u.split([module.key_dim, module.key_dim, module.value_dim], -1)
        num_keys, num_values = module.num_k_heads, module.num_v_heads
        q, k = split_heads(q, num_keys), split_heads(k, num_keys)
        q, k = _normalize(q, q.shape[-1] ** -0.5), _normalize(k)
        if num_values > num_keys:
            q, k = (x.repeat_interleave(num_values // num_keys, 2) for x in (q, k))
        lr = wide(projections["b"].sigmoid())
        if getattr(module, "allow_neg_eigval", False):
            lr = 2.0 * lr
        step = functional.softplus(wide(projections["a"]) + module.dt_bias)
        gates = {"lr": lr, "log_decay": -wide(module.A_log).exp() * step}
        return MemoryArguments(q=q, k=k, v=wide(split_heads(v, num_values)), gates=gates)

    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        z = projections["z"]
        z = z if z.dim() == 4 else split_heads(z, module.num_v_heads)
        norm, out = (
            (module.norm, module.out_proj)
            if hasattr(module, "out_proj")
            else (module.o_norm, module.o_proj)
        )
        return out(norm(y, z).flatten(2))  # type: ignore[no-any-return]


class KimiDeltaAttention(Family):
    """Layers of Kimi Linear, Bailing and GLM-5-Next."""

    name = "kimi delta attention"
    recipe = Recipe(retention=retention.Decay(per="key", when="before"))
    keys_first = True

    def matches(self, module: nn.Module) -> bool:
        gate = hasattr(module, "g_proj") or hasattr(module, "g_b_proj")
        names = ("forget_gate", "conv1d", "b_proj", "qkv_dim", "o_norm")
        return gate and has_attributes(module, *names)

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        u = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        z = module.g_proj(x) if hasattr(module, "g_proj") else module.g_b_proj(module.g_a_proj(x))
        return u, {"z": z, "b": module.b_proj(x), "g": module.forget_gate(x)}

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        q, k, v = (split_heads(x, module.num_heads) for x in u.split([module.qkv_dim] * 3, -1))
        log_decay = wide(projections["g"])
        if log_decay.dim() == 3:
            log_decay = split_heads(log_decay, module.num_heads)
        return MemoryArguments(
            q=_normalize(q, q.shape[-1] ** -0.5),
            k=_normalize(k),
            v=wide(v),
            gates={"lr": wide(projections["b"].sigmoid()), "log_decay": log_decay},
        )

    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        z = split_heads(projections["z"], module.num_heads)
        return module.o_proj(module.o_norm(y, z).flatten(2))  # type: ignore[no-any-return]


class Mamba2(Family):
    """Layers of Mamba-2, Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2."""

    name = "mamba2"
    recipe = Recipe(bias=bias.DotProduct(), retention=retention.Decay())

    def matches(self, module: nn.Module) -> bool:
        names = ("dt_bias", "D", "conv1d", "in_proj", "n_groups", "ssm_state_size")
        A_log = getattr(module, "A_log", None)
        return isinstance(A_log, Tensor) and A_log.dim() == 1 and has_attributes(module, *names)

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if hasattr(module, "ssm_in_multiplier"):
            x = x * module.ssm_in_multiplier
        projected = module.in_proj(x)
        if hasattr(module, "mup_vector"):
            projected = projected * module.mup_vector
        sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
        z, u, dt = projected.split(sizes, -1)
        return u, {"z": z, "dt": dt}

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        G, N, H = module.n_groups, module.ssm_state_size, module.num_heads
        v, k, q = wide(u).split([module.intermediate_size, G * N, G * N], -1)
        q, k = (split_heads(x, G).repeat_interleave(H // G, 2) for x in (q, k))
        step = functional.softplus(wide(projections["dt"]) + module.dt_bias)
        step = step.clamp(*module.time_step_limit)
        gates = {"lr": step, "log_decay": -wide(module.A_log).exp() * step}
        return MemoryArguments(q=q, k=k, v=split_heads(v, H), gates=gates)

    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        z = projections["z"]
        y = (wide(y) + wide(module.D)[:, None] * arguments.v).flatten(2)
        has_norm = isinstance(getattr(module, "norm", None), nn.Module)
        if has_norm and getattr(module, "mamba_rms_norm", True):
            y = module.norm(y, z)
        else:
            y = y * functional.silu(z)
        return module.out_proj(y.to(z.dtype))  # type: ignore[no-any-return]


class Mamba(Family):
    """Layers of Mamba, Falcon-Mamba, Jamba and Zamba: one memory, or one per head of Zamba."""

    name = "mamba"
    recipe = get("mamba").recipe

    def matches(self, module: nn.Module) -> bool:
        if not has_attributes(module, "A_log", "D", "conv1d", "in_proj", "time_step_rank"):
            return False
        return hasattr(module, "x_proj") or hasattr(module, "x_proj_weight")

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        projected = module.in_proj(x)
        if self._has_heads(module):
            u, z = projected.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            u, z = projected.chunk(2, -1)
        return u, {"z": z}

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        if self._has_heads(module):
            v = split_heads(u, module.n_mamba_heads)  # [B, T, H, V]
            mixed = torch.einsum("bthv,hrv->bthr", v, module.x_proj_weight)
        else:
            v, mixed = u.unsqueeze(2), module.x_proj(u).unsqueeze(2)
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        step, k, q = mixed.split(sizes, -1)
        if hasattr(module, "dt_layernorm"):  # Jamba and Falcon-Mamba
            step, k, q = module.dt_layernorm(step), module.b_layernorm(k), module.c_layernorm(q)
        if self._has_heads(module):
            step = torch.einsum("bthr,hvr->bthv", step, module.dt_proj_weight)
            step = step + wide(module.dt_proj_bias)
        else:
            with loaded(module.dt_proj):
                step = functional.linear(step, module.dt_proj.weight)
                step = step + wide(module.dt_proj.bias)
        step, A = functional.softplus(wide(step)), wide(module.A_log).exp()
        return MemoryArguments(
            q=wide(q),
            k=wide(k),
            v=wide(v),
            gates={"lr": step, "log_decay": -step},
            params={"decay_scale": A if A.dim() == 3 else A.unsqueeze(0)},
        )

    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        z, D = projections["z"], wide(module.D)
        y = (wide(y) + D.view(arguments.v.shape[2:]) * arguments.v).flatten(2)
        y = y * functional.silu(wide(z))
        return module.out_proj(y.to(z.dtype))  # type: ignore[no-any-return]

    def load_state(self, module: Any, stored: tuple[Tensor, ...]) -> dict[str, Any]:
        return {"weights": (stored[0] if self._has_heads(module) else stored[0].unsqueeze(1),)}

    def store_state(self, module: Any, state: State) -> tuple[Tensor, ...]:
        weights = state.weights[0]
        return (weights if self._has_heads(module) else weights.squeeze(1),)

    @staticmethod
    def _has_heads(module: nn.Module) -> bool:
        return hasattr(module, "n_mamba_heads")


for _family in (KimiDeltaAttention(), Mamba2(), GatedDeltaNet(), Mamba()):
    register_family(_family)
