"""`recollect.recall` of one sequence that several ranks hold, a segment each."""

from __future__ import annotations

import dataclasses
import itertools
import zlib

import torch
from torch import Tensor

from recollect.engines.common.problem import state_dtype
from recollect.parallel.exchange import Exchange
from recollect.parallel.link import Group, link_of
from recollect.parallel.memorise import memorise_segment
from recollect.parallel.segment import Segment, pieces_of, segment_of
from recollect.parallel.ways import Way, way_of
from recollect.recall.arguments import check_flags, check_tensors, named
from recollect.recall.bound import bind
from recollect.recall.call import Call
from recollect.recall.checks import check_call
from recollect.recall.modes import refuse_transforms
from recollect.recall.packing import CompactedBatch, compact, scatter, taken
from recollect.recipe.argument import Stated, recipe_of
from recollect.recipe.recipe import Recipe
from recollect.state.state import State, initial_state, join_states
from recollect.typing import Gates, Init, Params

__all__ = ["agreed", "number_of_pieces", "recall"]


def recall(
    recipe: Stated,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    params: Params | None = None,
    init: Init | None = None,
    state: State | None = None,
    group: Group = None,
    way: str = "auto",
    pieces: int | None = None,
    method: str = "auto",
    causal: bool = True,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    output_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Memorise and read one sequence that is split over ranks: y_t = M(W_t; φ(q_t)).

    Rank r of the group holds the r-th segment of every row; segments may differ in length. All
    ranks call this with the same recipe, params, ``init`` and ``state``, and outputs, gradients
    and the final state are those of `recollect.recall` on the whole sequence. A rank's gradient of
    what all ranks share (params, ``init``, ``state``) is its part: the sum over ranks is all of it.
    A backward pass has to run on every rank.

    Args:
        recipe: the regression problem; the name of an architecture, or what has a recipe, will do.
        q, k, v, gates: of this rank's segment, T ≥ 1 tokens, as `recollect.recall` takes them.
        params: learned tensors by name, the same on all ranks.
        init: initial memory before the first token of all, the same on all ranks.
        state: before the first token of all, the same on all ranks; not together with ``init``.
        group: the ranks in the order of their segments: a process group or a mesh of one dimension;
            ``None`` is all processes.
        way: ``"auto"`` (by structure, `way_of`), ``"affine"``, ``"gather"`` or ``"hand_over"``.
        pieces: m ≥ 1, how many pieces of rows and heads follow each other in a hand-over: ranks
            idle for (R − 1)/(R − 1 + m) of the time. Default: 4 (R − 1), if there are as many.
        method: engine, as in `recollect.recall`.
        causal: not False: a rank cannot read what later ranks memorise.
        attention_mask: ``[B, T]`` of this rank's tokens, nonzero at real ones.
        cu_seqlens: ``[N + 1]`` borders of N documents packed in one row, of the *whole* sequence,
            the same on all ranks; they may cross the borders of ranks.
        chunk_size: an execution detail; it does not change results.
        precision: of products, as in `recollect.recall`.
        output_state: False returns ``None`` in place of the final state.

    Returns:
        ``y [B, T, Hq, V]`` of this rank's tokens, and the state after the last token of all (one
        row per document where they are packed), the same on all ranks.

    Raises:
        RecipeError: as `recollect.recall`; a way that the recipe does not allow.
        ValueError: as `recollect.recall`; no process group; ranks that disagree on the recipe or on
            sizes; a rank without a token; ``causal=False``.

    Examples:
        On one rank, or started with torchrun on several::

            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            q, k, v = (x.tensor_split(ranks, dim=1)[rank] for x in whole)
            y, state = rc.parallel.recall("delta_net", q, k, v, gates)

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4)  # this rank's segment; one rank has all of it
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.1))
        >>> y, state = rc.parallel.recall(recipe, q, k, v)
        >>> torch.allclose(y, rc.recall(recipe, q, k, v)[0], atol=1e-6)
        True
        >>> dist.destroy_process_group()
    """
    recipe = recipe_of(recipe, "rc.parallel.recall")
    check_flags(causal=causal, output_state=output_state)
    if not causal:
        raise ValueError(
            "causal=False reads what later tokens memorise, and a sequence that is split over "
            "ranks is read in its order: keep the sequence on one rank, or use causal=True"
        )
    gates, params = named(gates, "gates"), named(params, "params")
    refuse_transforms(itertools.chain((q, k, v), gates.values(), params.values()))
    check_tensors(recipe, q, k, v)
    chosen = way_of(recipe, way)
    link = link_of(group)
    exchange = Exchange(link, q, k, v, *gates.values(), shared=tuple(params.values()))
    call = Call(
        bound=bind(
            recipe,
            H=k.shape[2],
            K=k.shape[-1],
            V=v.shape[-1],
            method=method,
            precision=precision,
        ),
        q=q,
        k=k,
        v=v,
        gates=gates,
        params=params,
        init=init,
        state=state,
        attention_mask=attention_mask,
        chunk_size=chunk_size,
    )
    count = number_of_pieces(pieces, link.ranks)
    if cu_seqlens is not None:
        if k.shape[0] != 1 or attention_mask is not None:
            raise ValueError("cu_seqlens packs documents in one row without padding: B must be 1")
        tokens = tuple(row[0] for row in exchange.numbers(k.shape[1]))
        borders, documents = pieces_of(cu_seqlens, tokens, link.rank)
        before = _documents(call, cu_seqlens.shape[0] - 1)
        here = torch.tensor(documents, device=k.device)
        call = dataclasses.replace(call, cu_seqlens=borders, init=None, state=before.select(here))
    check_call(call)
    batch = None
    if attention_mask is not None:
        batch = compact(attention_mask)
        call = _compacted(call, batch)
    same = agreed(recipe, chosen, count, (k.shape[2], k.shape[-1], v.shape[-1]))
    segment = segment_of(exchange, k, lengths=call.lengths, borders=call.cu_seqlens, same=same)
    y, after = memorise_segment(call, segment, chosen, pieces=count)
    if batch is not None:
        y = scatter(y, batch)
    final = _final(after, segment, cu_seqlens) if output_state else None
    (y,) = exchange.tie(y)
    return y, final


def number_of_pieces(pieces: int | None, ranks: int) -> int:
    """Pieces that a hand-over is cut into, if there are as many rows and heads.

    Args:
        pieces: as asked for, or ``None``.
        ranks: R.

    Raises:
        ValueError: fewer than one.
    """
    if pieces is None:
        return max(1, 4 * (ranks - 1))
    if not isinstance(pieces, int) or isinstance(pieces, bool) or pieces < 1:
        raise ValueError(f"pieces must be a whole number of at least 1, not {pieces!r}")
    return pieces


def agreed(
    recipe: Recipe, way: Way, pieces: int, sizes: tuple[int, ...]
) -> tuple[tuple[str, int], ...]:
    """What all ranks have to agree on, by name, as numbers.

    Args:
        recipe: the regression problem.
        way: how it goes from rank to rank.
        pieces: of a hand-over.
        sizes: of memories, keys and values.
    """
    names = ("the number of memories", "the size of keys", "the size of values")
    return (
        ("the recipe (its checksum)", zlib.crc32(recipe.normal_form.encode())),
        ("the way", zlib.crc32(way.name.encode())),
        ("pieces", pieces),
        *zip(names, sizes, strict=True),
    )


def _documents(call: Call, documents: int) -> State:
    """The state before each document of the whole sequence."""
    if call.state is not None:
        if call.state.rows != documents:
            raise ValueError(
                f"the state has {call.state.rows} rows and this call {documents} documents"
            )
        if call.init is not None:
            raise ValueError("init and state exclude each other: a state already holds its memory")
        return call.state
    return initial_state(
        call.bound.sized,
        B=documents,
        dtype=state_dtype(call.q, call.k, call.v),
        device=call.k.device,
        init=call.init,
    )


def _compacted(call: Call, batch: CompactedBatch) -> Call:
    """The call's real tokens on the left."""
    return taken(call, batch, batch.gather)


def _final(after: State, segment: Segment, borders: Tensor | None) -> State:
    """The state after the last token of all, or after each document, at all ranks."""
    exchange, link = segment.exchange, segment.exchange.link
    if borders is None:
        return exchange.share(after if link.last else None, link.ranks - 1)
    states: list[State] = []
    for rank in range(link.ranks):
        # The last piece goes on, and is the next rank's to end.
        ends = pieces_of(borders, segment.tokens, rank)[0].shape[0] - 1 - (rank < link.ranks - 1)
        if ends:
            own = None
            if rank == link.rank:
                own = after.select(torch.arange(ends, device=after.position.device))
            states.append(exchange.share(own, rank))
    return join_states(states)
