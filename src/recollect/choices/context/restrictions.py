"""Restrictions of `KernelWeighted`: chosen blocks, a bilinear gate, windows, omitted starts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.context.base import Context
from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.features.base import resolve_tau, tau_text
from recollect.choices.member import member
from recollect.fields import Gate, flag, integer, number, option

__all__ = ["Bilinear", "SinkWindow", "SkipFirst", "TopBlocks"]


class _Restriction(Context):
    """Base of contexts that reweight the associations of another context."""

    is_restriction = True

    horizon = None  # type: ignore[assignment]

    factor = "g_i^(t)"  # type: ignore[assignment]


@member
class Bilinear(_Restriction):
    """A gate between query and association, g_i^(t) = a_i·b_t/τ (AM 2.1.2, after 31).

    a is the gate ``"gate_key" [B, T, H, K]`` of the association, b the gate ``"gate_query"`` of the
    query. SwiGLU is the identity link over ``SwishKernel`` (AM 29).

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

    query_gates = ("gate_query",)

    @property
    def signed(self) -> bool:  # type: ignore[override]
        return self.link == "identity"

    def gates(self) -> tuple[Gate, ...]:
        return (
            Gate(name="gate_key", owner=self.title, axes=("K",), per_association=True, role="key"),
            Gate(name="gate_query", owner=self.title, axes=("K",), role="key"),
        )

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        keys_all, queries_all = visible.rates["gate_key"], visible.query_rates["gate_query"]
        tau = resolve_tau(self.temperature, keys_all.shape[-1])

        def score(queries: slice, keys: slice) -> Tensor:
            a, b = keys_all[:, keys].transpose(1, 2), queries_all[:, queries].transpose(1, 2)
            return (b @ a.transpose(-1, -2) / tau).unsqueeze(2)  # [B, H, 1, C, m]

        if self.signed:
            return ContextWeights(value=score)
        return ContextWeights(log=lambda queries, keys: functional.logsigmoid(score(queries, keys)))

    def notes(self) -> tuple[str, ...]:
        tau = "" if self.temperature == 1.0 else f"/{tau_text(self.temperature)}"
        form = f"a_i·b_t{tau}"
        return (f"g_i^(t) = {form if self.signed else f'σ({form})'}",)


@member
class TopBlocks(_Restriction):
    """The associations of the top blocks, which each query chooses (MoBA, AM 25–27).

    A document's tokens fall into blocks of ``size``. A query scores each block that has begun and
    sees the associations of the ``top_k`` best.

    Args:
        size: associations per block, ≥ 1.
        top_k: blocks a query sees, ≥ 1, the current one included; fewer if fewer have begun.
        score: ``"mean"``: q · mean of the block's keys (AM 27), before later tokens move them.
            ``"router"``: q · mean of the gate ``"router" [B, T, H, K]`` of its associations.
        include_current: whether the query's own block is always chosen; the last block if a state
            is only read.
        weighting: ``"one"``: weight 1 for every association of a chosen block (AM 26).
            ``"softmax"``: the softmax of the chosen blocks' scores, which trains the router.

    Examples:
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalConstant(),
        ...     context=rc.context.KernelWeighted(
        ...         restrictions=(rc.context.TopBlocks(size=2, top_k=1),)
        ...     ),
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> torch.allclose(y[:, 4], v[:, 4])  # token 4 is the first of its block
        True
    """

    shown = ("size", "top_k")

    size: int = integer(at_least=1, size=True)
    top_k: int = integer(at_least=1, size=True)
    score: str = option("mean", "router")
    include_current: bool = flag(True)
    weighting: str = option("one", "softmax")

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.size

    def gates(self) -> tuple[Gate, ...]:
        if self.score == "mean":
            return ()
        return (
            Gate(name="router", owner=self.title, axes=("K",), per_association=True, role="key"),
        )

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        router_keys = visible.k
        if self.score == "router":
            router_keys = visible.rates["router"].to(router_keys.dtype)
        B, n, H, K = router_keys.shape
        router_keys = torch.where(visible.valid[..., None, None], router_keys, 0.0)
        block = torch.where(visible.valid, visible.position, 0).div(
            self.size, rounding_mode="floor"
        )
        query_block = visible.query_position.clamp_min(0).div(self.size, rounding_mode="floor")
        if visible.max_position is not None:
            count = max(1, -(-visible.max_position // self.size))
        else:
            count = int(max(x.max() if x.numel() else 0 for x in (block, query_block))) + 1
        # Sums of whole blocks, and of each block up to every slot: a query sees its own so far.
        index = block[..., None, None].expand(B, n, H, K)
        sums = router_keys.new_zeros(B, count, H, K).scatter_add(1, index, router_keys)
        sizes = router_keys.new_zeros(B, count)
        sizes = sizes.scatter_add(1, block, visible.valid.to(sizes.dtype))
        means = sums / sizes.clamp_min(1)[..., None, None]
        needs_own_mean = not (self.include_current and self.weighting == "one")
        needs_own_mean &= visible.first_slot < n  # not if a state is only read
        key_cumsum = router_keys.double().cumsum(1) if needs_own_mean else router_keys

        def own_mean(queries: slice) -> Tensor:
            """Return the mean of each query's block up to the query, ``[B, C, H, K]``."""
            slot = visible.query_slots[queries]
            start = query_block[:, queries] * self.size
            length = visible.query_position[:, queries] - start + 1  # [B, C]
            last = slot - length
            past = key_cumsum.gather(1, last.clamp_min(0)[..., None, None].expand(-1, -1, H, K))
            past = torch.where((last >= 0)[..., None, None], past, 0.0)
            total = (key_cumsum[:, slot] - past) / length.clamp_min(1)[..., None, None]
            return total.to(router_keys.dtype)

        def log_weight(queries: slice, keys: slice) -> Tensor:
            q = visible.q[:, queries]  # [B, C, H, G, K]
            current = query_block[:, queries, None]
            scores = torch.einsum("bchgk,bnhk->bhgcn", q, means)
            blocks = torch.arange(count, device=q.device)
            is_own = (blocks == current)[:, None, None]  # [B, 1, 1, C, count]
            if needs_own_mean:
                own_score = torch.einsum("bchgk,bchk->bhgc", q, own_mean(queries))
                scores = torch.where(is_own, own_score.unsqueeze(-1), scores)
            has_started = (blocks <= current)[:, None, None]
            order = scores.masked_fill(~has_started, -torch.inf)
            if self.include_current:
                order = order.masked_fill(is_own, torch.inf)
            best = order.detach().topk(min(self.top_k, count), dim=-1).indices
            chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, best, True) & has_started
            if self.weighting == "one":
                log = torch.zeros_like(scores)
            else:
                log = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
            log = log.masked_fill(~chosen, -torch.inf)
            index = block[:, None, None, None, keys].expand(*log.shape[:-1], -1)
            return log.gather(-1, index)

        return ContextWeights(log=log_weight, is_binary=self.weighting == "one")

    def notes(self) -> tuple[str, ...]:
        router_key = "k_i" if self.score == "mean" else "r_i"
        weight = "1" if self.weighting == "one" else "the softmax of the scores"
        current = ", the current one among them" if self.include_current else ""
        return (
            f"g_i^(t) = {weight} in the {self.top_k} best blocks of {self.size} tokens{current}, "
            f"by q_t·mean({router_key}), else 0",
        )


@member
class SinkWindow(_Restriction):
    """The last c associations and the first n of the document (attention sinks).

    g_i^(t) = 1 for i ≤ n and for i > t − c, else 0: the first tokens remain visible to the whole
    document (Titans' persistent tokens; Xiao et al. 2024). The state is n + c associations.

    Args:
        size: c ≥ 1.
        num_sinks: n ≥ 0; with 0 this is ``Window(size=c, gated=False)``.

    Examples:
        >>> context = rc.context.SinkWindow(size=4, num_sinks=2)
        >>> context.horizon, context.num_kept
        (None, 6)
    """

    shown = ("size", "num_sinks")

    size: int = integer(at_least=1, size=True)
    num_sinks: int = integer(0, size=True)  # type: ignore[assignment]

    @property
    def num_kept(self) -> int:
        return self.num_sinks + self.size

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        def log_weight(queries: slice, keys: slice) -> Tensor:
            key = visible.position[:, None, keys]
            query = visible.query_position[:, queries, None]
            hidden = (key >= self.num_sinks) & (key <= query - self.size)  # [B, C, m]
            log = torch.zeros(hidden.shape, dtype=visible.q.dtype, device=hidden.device)
            return log.masked_fill(hidden, -torch.inf)[:, None, None]

        band = (self.num_sinks, self.size)
        return ContextWeights(log=log_weight, is_binary=True, sink_and_window=band)

    def notes(self) -> tuple[str, ...]:
        return (
            f"g_i^(t) = 1 for the last {self.size} associations and the first {self.num_sinks} of "
            "the document, else 0",
        )


@member
class SkipFirst(_Restriction):
    """All associations but the first n of the document.

    g_i^(t) = 0 for i ≤ n, else 1. With keys of the token n before (`recollect.Tie`), the first n
    values have no key. The first n outputs of a mean are 0.

    Args:
        size: n ≥ 1.

    Examples:
        >>> context = rc.context.KernelWeighted(restrictions=(rc.context.SkipFirst(size=1),))
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalConstant(), context=context, algorithm=rc.algorithm.Analytic()
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> y[:, 0].any()
        tensor(False)
        >>> torch.allclose(y[:, 1], v[:, 1])
        True
    """

    shown = ("size",)

    size: int = integer(1, at_least=1, size=True)

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        log = torch.zeros_like(visible.position, dtype=visible.q.dtype)
        log = log.masked_fill(visible.position < self.size, -torch.inf)  # [B, n]

        def log_weight(queries: slice, keys: slice) -> Tensor:
            num_queries = visible.query_slots[queries].shape[0]
            return log[:, None, None, None, keys].expand(-1, -1, -1, num_queries, -1)

        return ContextWeights(log=log_weight, is_binary=True, may_hide_all=True)

    def notes(self) -> tuple[str, ...]:
        first = f"{self.size} associations" if self.size > 1 else "association"
        return (f"g_i^(t) = 0 for the first {first} of the document, else 1",)
