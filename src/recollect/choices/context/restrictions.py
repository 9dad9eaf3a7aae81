"""Restrictions inside `Similar`: chosen blocks, a bilinear gate, a window with a fixed front."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.context.base import Context
from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.fields import Gate, flag, integer, number, option
from recollect.choices.member import member

__all__ = ["Bilinear", "Blocks", "SinkWindow"]


class _Restriction(Context):
    """What only weighs associations that another context has gathered."""

    restricts = True

    @property
    def horizon(self) -> None:
        return None

    @property
    def factor(self) -> str:
        return "g_i^(t)"


@member
class Bilinear(_Restriction):
    """A gate between query and association, g_i^(t) = a_i·b_t/τ (AM 2.1.2, after 31).

    a comes from the gate ``"gate_key" [B, T, H, K]``, which travels with the association, b from
    ``"gate_query"``. SwiGLU is the identity link over ``SwishKernel`` (AM 29).

    Args:
        link: ``"identity"``: g may be negative, for plain sums. ``"sigmoid"``: σ(g), for means.
        temperature: τ > 0; ``None`` is √K.

    Examples:
        >>> [(gate.name, gate.axes) for gate in rc.context.Bilinear().gates()]
        [('gate_key', ('K',)), ('gate_query', ('K',))]
        >>> rc.context.Bilinear().signed, rc.context.Bilinear(link="sigmoid").signed
        (True, False)
    """

    link: str = option("identity", "sigmoid")
    temperature: float | None = number(1.0, above=0, optional=True)

    reads = ("gate_query",)

    @property
    def signed(self) -> bool:  # type: ignore[override]
        return self.link == "identity"

    def gates(self) -> tuple[Gate, ...]:
        return (
            Gate(name="gate_key", owner=self.title, axes=("K",), travels=True),
            Gate(name="gate_query", owner=self.title, axes=("K",)),
        )

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        keys_all, queries_all = visible.rates["gate_key"], visible.asked["gate_query"]
        tau = math.sqrt(keys_all.shape[-1]) if self.temperature is None else self.temperature

        def score(queries: slice, keys: slice) -> Tensor:
            a, b = keys_all[:, keys].transpose(1, 2), queries_all[:, queries].transpose(1, 2)
            return (b @ a.transpose(-1, -2) / tau).unsqueeze(2)  # [B, H, 1, C, m]

        if self.signed:
            return ContextWeights(value=score)
        return ContextWeights(log=lambda queries, keys: functional.logsigmoid(score(queries, keys)))

    def notes(self) -> tuple[str, ...]:
        tau = {None: "/√K", 1.0: ""}.get(self.temperature, f"/{self.temperature or 1:g}")
        form = f"a_i·b_t{tau}"
        return (f"g_i^(t) = {form if self.signed else f'σ({form})'}",)


@member
class Blocks(_Restriction):
    """The associations of the top blocks: consecutive ones that a query chooses (MoBA, AM 25–27).

    A document's tokens fall into blocks of ``size``. A query scores each block that has begun and
    sees the associations of the ``top`` best.

    Args:
        size: associations per block, ≥ 1.
        top: blocks a query sees, ≥ 1, the current one included; fewer where fewer have begun.
        score: ``"mean"``: q · mean of the block's keys (AM 27). ``"router"``: q · mean of the gate
            ``"router" [B, T, H, K]``, which travels with the association.
        current: whether the query's own block is always chosen, whatever its score; when a state
            is only read, the last block.
        share: ``"one"``: every association of a chosen block weighs 1 (AM 26). ``"softmax"``: the
            softmax of the chosen blocks' scores, through which the router learns.

    Examples:
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalConstant(),
        ...     context=rc.context.Similar(within=(rc.context.Blocks(size=2, top=1),)),
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> torch.allclose(y[:, 4], v[:, 4])  # token 4 begins a block, and sees that one alone
        True
    """

    shown = ("size", "top")

    size: int = integer(at_least=1, size=True)
    top: int = integer(at_least=1, size=True)
    score: str = option("mean", "router")
    current: bool = flag(True)
    share: str = option("one", "softmax")

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.size

    def gates(self) -> tuple[Gate, ...]:
        if self.score == "mean":
            return ()
        return (Gate(name="router", owner=self.title, axes=("K",), travels=True),)

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        label = visible.k
        if self.score == "router":  # keys are float64 where no ridge bounds a fit's rounding
            label = visible.rates["router"].to(label.dtype)
        B, n, H, K = label.shape
        real = visible.valid[..., None, None]
        label = torch.where(real, label, 0.0)
        block = torch.where(visible.valid, visible.position, 0).div(
            self.size, rounding_mode="floor"
        )
        own = visible.where.clamp_min(0).div(self.size, rounding_mode="floor")  # [B, T]
        if visible.end is not None:
            count = max(1, -(-visible.end // self.size))
        else:
            count = int(max(x.max() if x.numel() else 0 for x in (block, own))) + 1
        # Sums of whole blocks, and of each block up to every slot: a query sees its own so far.
        index = block[..., None, None].expand(B, n, H, K)
        sums = label.new_zeros(B, count, H, K).scatter_add(1, index, label)
        sizes = torch.zeros(B, count, dtype=label.dtype, device=label.device)
        sizes = sizes.scatter_add(1, block, visible.valid.to(label.dtype))
        means = sums / sizes.clamp_min(1)[..., None, None]
        reading = visible.first >= n
        running = label.double().cumsum(1) if not (self.current and self.share == "one") else None

        def own_mean(queries: slice) -> Tensor:
            """The mean of each query's block up to the query, ``[B, C, H, K]``."""
            assert running is not None
            slot = visible.slots[queries]
            inside = visible.where[:, queries] - own[:, queries] * self.size + 1  # [B, C]
            before = slot - inside
            past = running.gather(1, before.clamp_min(0)[..., None, None].expand(-1, -1, H, K))
            past = torch.where((before >= 0)[..., None, None], past, 0.0)
            total = (running[:, slot] - past) / inside.clamp_min(1)[..., None, None]
            return total.to(label.dtype)

        def log_weight(queries: slice, keys: slice) -> Tensor:
            q = visible.q[:, queries]  # [B, C, H, G, K]
            here = own[:, queries]
            scores = torch.einsum("bchgk,bnhk->bhgcn", q, means)
            blocks = torch.arange(count, device=q.device)
            mine = (blocks == here[..., None])[:, None, None]  # [B, 1, 1, C, count]
            if running is not None and not reading:
                now = torch.einsum("bchgk,bchk->bhgc", q, own_mean(queries))
                scores = torch.where(mine, now.unsqueeze(-1), scores)
            begun = (blocks <= here[..., None])[:, None, None]
            order = scores.masked_fill(~begun, -torch.inf)
            if self.current:
                order = order.masked_fill(mine, torch.inf)
            best = order.detach().topk(min(self.top, count), dim=-1).indices
            chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, best, True) & begun
            if self.share == "one":
                log = torch.zeros_like(scores)
            else:
                log = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
            log = log.masked_fill(~chosen, -torch.inf)
            where = block[:, None, None, None, keys].expand(*log.shape[:-1], -1)
            return log.gather(-1, where)

        return ContextWeights(log=log_weight, hard=self.share == "one")

    def notes(self) -> tuple[str, ...]:
        label = "k_i" if self.score == "mean" else "r_i"
        share = "1" if self.share == "one" else "the softmax of the scores"
        own = ", the current one among them" if self.current else ""
        return (
            f"g_i^(t) = {share} in the {self.top} best blocks of {self.size} tokens{own}, by "
            f"q_t·mean({label}), else 0",
        )


@member
class SinkWindow(_Restriction):
    """The last c associations, and the first n of the document, which stay (attention sinks).

    g_i^(t) = 1 for i ≤ n and for i > t − c, else 0: tokens in front of a text remain visible to all
    of it (Titans' persistent tokens; Xiao et al. 2024). The state is n + c associations.

    Args:
        size: c ≥ 1.
        first: n ≥ 0; with 0 this is ``Window(size=c, gated=False)``.

    Examples:
        >>> context = rc.context.SinkWindow(size=4, first=2)
        >>> context.horizon, context.keeps
        (None, 6)
    """

    shown = ("size", "first")

    size: int = integer(at_least=1, size=True)
    first: int = integer(0, size=True)  # type: ignore[assignment]  # a field answers the question

    @property
    def keeps(self) -> int:
        return self.first + self.size

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        position, where = visible.position, visible.where

        def log_weight(queries: slice, keys: slice) -> Tensor:
            at, query = position[:, None, keys], where[:, queries, None]
            shown = (at < self.first) | (at > query - self.size)  # [B, C, m]
            log = torch.zeros(shown.shape, dtype=visible.q.dtype, device=shown.device)
            return log.masked_fill(~shown, -torch.inf)[:, None, None]

        return ContextWeights(log=log_weight, hard=True, band=(self.first, self.size))

    def notes(self) -> tuple[str, ...]:
        return (
            f"g_i^(t) = 1 for the last {self.size} associations and the first {self.first} of the "
            "document, else 0",
        )
