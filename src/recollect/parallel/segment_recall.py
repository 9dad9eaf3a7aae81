"""`recollect.recall` of one sequence that is split over several ranks."""

from __future__ import annotations

import dataclasses
import zlib

import torch
from torch import Tensor

from recollect.fields import int_check, validate
from recollect.functional.checks import check_call, check_flags
from recollect.functional.packing import compact, scatter, select_tokens
from recollect.functional.recall import new_call, with_initial_state
from recollect.parallel.exchange import Exchange
from recollect.parallel.link import Group, rank_group
from recollect.parallel.memorise import memorise_segment
from recollect.parallel.segment import Segment, local_pieces, segment_of
from recollect.parallel.strategies import Strategy, strategy_for
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.state.state import State, join_states
from recollect.typing import Gates, Init, Params

__all__ = ["consensus_values", "num_microbatches", "recall"]


def recall(
    recipe: RecipeLike,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    params: Params | None = None,
    initial_memory: Init | None = None,
    state: State | None = None,
    group: Group = None,
    strategy: str = "auto",
    microbatches: int | None = None,
    engine: str = "auto",
    causal: bool = True,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Memorise and read one sequence that is split over ranks: y_t = M(W_t; φ(q_t)).

    Rank r of the group has the r-th segment of every sequence. Segments may differ in length. All
    ranks use equal recipes, params, ``initial_memory`` and ``state``. Outputs, gradients and the
    final state are those of `recollect.recall` on the full sequence. Gradients of params,
    ``initial_memory`` and ``state`` are summands: their sum over ranks is the full gradient. The
    backward pass must run on every rank.

    Args:
        recipe: the regression problem, an object with a recipe, or the name of an architecture.
        q, k, v, gates: tensors of this rank's segment of T ≥ 1 tokens, as for `recollect.recall`.
        params: learned tensors by name, equal on all ranks.
        initial_memory: memory before the first token of the sequence, equal on all ranks.
        state: state before the first token of the sequence, equal on all ranks; excludes
            ``initial_memory``.
        group: the ranks in the order of their segments: a process group or a mesh of one dimension;
            ``None`` is all processes.
        strategy: ``"auto"`` (by structure, `strategy_for`), ``"affine"``, ``"gather"`` or
            ``"sequential"``.
        microbatches: number m ≥ 1 of pieces of rows and heads in the sequential strategy. Ranks
            idle for (R − 1)/(R − 1 + m) of the time. Default: 4 (R − 1), or fewer if there are
            fewer rows and heads.
        engine: engine, as in `recollect.recall`.
        causal: must be True: a rank cannot read the associations of later ranks.
        attention_mask: ``[B, T]`` of this rank's tokens, nonzero at valid ones.
        cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence, in the *full*
            sequence, equal on all ranks. Documents may extend over several ranks.
        chunk_size: number of tokens per chunk, which affects only speed.
        precision: precision of matrix products, as in `recollect.recall`.
        output_final_state: whether to return the final state; if not, ``None``.

    Returns:
        ``y [B, T, Hq, V]`` of this rank's tokens, and the state after the last token of the
        sequence, equal on all ranks. With packed documents, it has one row per document.

    Raises:
        RecipeError: as `recollect.recall`; a strategy that the recipe does not allow.
        ValueError: as `recollect.recall`; no process group; ranks with different recipes or sizes;
            a rank without a token; ``causal=False``.

    Examples:
        On one rank, or started with torchrun on several::

            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            q, k, v = (x.tensor_split(ranks, dim=1)[rank] for x in whole)
            y, state = rc.parallel.recall("delta_net", q, k, v, gates)

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4)  # this rank's segment, here the full sequence
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.1))
        >>> y, state = rc.parallel.recall(recipe, q, k, v)
        >>> torch.allclose(y, rc.recall(recipe, q, k, v)[0], atol=1e-6)
        True
        >>> dist.destroy_process_group()
    """
    recipe = as_recipe(recipe, "rc.parallel.recall")
    check_flags(causal=causal, output_final_state=output_final_state)
    if not causal:
        raise ValueError(
            "causal=False reads associations of later tokens, which is not supported over ranks: "
            "keep the sequence on one rank, or use causal=True"
        )
    chosen = strategy_for(recipe, strategy)
    link = rank_group(group)
    call = new_call(
        *(recipe, q, k, v, gates, params, engine, precision),
        initial_memory=initial_memory,
        state=state,
        attention_mask=attention_mask,
        chunk_size=chunk_size,
    )
    exchange = Exchange(link, q, k, v, *call.gates.values(), shared=tuple(call.params.values()))
    count = num_microbatches(microbatches, link.ranks)
    if cu_seqlens is not None:
        if k.shape[0] != 1 or attention_mask is not None:
            raise ValueError(
                "cu_seqlens packs documents in one sequence without padding: B must be 1"
            )
        tokens = tuple(size for (size,) in link.numbers((k.shape[1],), k.device))
        boundaries, documents = local_pieces(cu_seqlens, tokens, link.rank)
        num_documents = cu_seqlens.shape[0] - 1
        if state is None:
            call = with_initial_state(call, rows=num_documents)
        elif state.rows != num_documents:
            raise ValueError(
                f"the state has {state.rows} rows, and this call has {num_documents} documents"
            )
        initial = call.state.select(torch.tensor(documents, device=k.device))
        call = dataclasses.replace(call, cu_seqlens=boundaries, state=initial)
    check_call(call)
    batch = None
    if attention_mask is not None:
        batch = compact(attention_mask)
        call = select_tokens(call, batch)
    same = consensus_values(recipe, chosen, count, (k.shape[2], k.shape[-1], v.shape[-1]))
    segment = segment_of(exchange, k, lengths=call.lengths, boundaries=call.cu_seqlens, same=same)
    y, final = memorise_segment(call, segment, chosen, pieces=count)
    if batch is not None:
        y = scatter(y, batch)
    final = _final_state(final, segment, cu_seqlens) if output_final_state else None
    (y,) = exchange.attach_to_outputs(y)
    return y, final


def num_microbatches(pieces: int | None, ranks: int) -> int:
    """Return the maximum number of microbatches of the sequential strategy, as requested or not."""
    if pieces is None:
        return max(1, 4 * (ranks - 1))
    return validate("microbatches", int_check(1), pieces)


def consensus_values(
    recipe: Recipe, strategy: Strategy, pieces: int, sizes: tuple[int, ...]
) -> tuple[tuple[str, int], ...]:
    """Return the values that must be equal on all ranks, by name; ``sizes`` are H, K and V."""
    names = ("the number of memories", "the size of keys", "the size of values")
    return (
        ("the recipe (its checksum)", zlib.crc32(recipe.normal_form.encode())),
        ("the strategy", zlib.crc32(strategy.name.encode())),
        ("pieces", pieces),
        *zip(names, sizes, strict=True),
    )


def _final_state(final: State, segment: Segment, boundaries: Tensor | None) -> State:
    """Return the state after the last token of the sequence, or after each document."""
    exchange, link = segment.exchange, segment.exchange.link
    if boundaries is None:
        return exchange.broadcast_state(final if link.last else None, link.ranks - 1)
    states: list[State] = []
    for rank in range(link.ranks):
        # The next rank continues the last piece, so it does not end here.
        num_pieces = local_pieces(boundaries, segment.tokens, rank)[0].shape[0] - 1
        num_ends = num_pieces - (rank < link.ranks - 1)
        if num_ends:
            local = None
            if rank == link.rank:
                local = final.select(torch.arange(num_ends, device=final.position.device))
            states.append(exchange.broadcast_state(local, rank))
    return join_states(states)
