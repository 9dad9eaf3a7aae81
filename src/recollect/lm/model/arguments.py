"""Interpret the extra keyword arguments that transformers passes to ``forward``.

Trainers and collators pass arguments meant for attention. Redundant ones are accepted, document
boundaries are converted to ``cu_seqlens``, and anything that a memory cannot follow raises.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

__all__ = [
    "ForwardArguments",
    "HeadlessArguments",
    "check_token_ids",
    "document_borders",
    "embedded",
]


class ForwardArguments(TypedDict, total=False):
    """Further arguments of a forward pass, with transformers' names.

    Attributes:
        position_ids: ``[B or 1, T]``, counting the tokens from 0 (padding is not looked at);
            documents begin where they start over.
        cache_position: ``[T]``, columns of the batch: those after the cache.
        cu_seq_lens_q, cu_seq_lens_k: ``[N + 1]`` borders of documents, as ``cu_seqlens``.
        seq_idx: ``[B, T]``, the number of each token's document.
        max_length_q, max_length_k: of the longest document; nothing needs it.
        output_attentions: not true, because there are no attention weights.
        output_router_logits: not true: what routers of memories cost is in ``aux_loss``.
        is_causal: not false, because a memory knows only the past.
        token_type_ids: zeros, because there is one kind of token.
        return_dict: false gives a tuple in place of an output object.
    """

    position_ids: Tensor | None
    cache_position: Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    seq_idx: Tensor | None
    max_length_q: int | None
    max_length_k: int | None
    output_attentions: bool | None
    output_router_logits: bool | None
    is_causal: bool | None
    token_type_ids: Tensor | None
    return_dict: bool | None


class HeadlessArguments(ForwardArguments, total=False):
    """Those of a model without a head.

    Attributes:
        num_items_in_batch: of the loss, which such a model has not.
    """

    num_items_in_batch: int | Tensor | None


_REFUSED: dict[str, tuple[Any, str]] = {
    "output_attentions": (True, "a memory has no attention weights to give: leave it out"),
    "output_router_logits": (
        True,
        "logits of routers are not handed out: leave it out, and read aux_loss",
    ),
    "is_causal": (False, "a memory knows only the past: leave it out"),
}


def check_token_ids(ids: object) -> None:
    """Check type, shape and dtype of ``input_ids``; values are not checked."""
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"input_ids must be a tensor [B, T] of token ids, not {type(ids).__name__}: "
            "torch.tensor([[1, 2, 3]]) is one row of three tokens"
        )
    if ids.dim() != 2:
        hint = ": one text is a batch of one row, input_ids[None]" if ids.dim() == 1 else ""
        raise ValueError(f"input_ids must have shape [B, T], not {list(ids.shape)}{hint}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be token ids in int64, not {ids.dtype}: convert them by .long(), or "
            "give vectors as inputs_embeds"
        )


def embedded(table: nn.Module, ids: Tensor, vocabulary: int) -> Tensor:
    """Return the vectors ``[B, T, D]`` of tokens ``[B, T]``.

    An id out of range raises ValueError on a CPU. A GPU would need a synchronisation to check it.
    """
    check_token_ids(ids)
    if torch.compiler.is_compiling():
        return table(ids)  # type: ignore[no-any-return]
    try:
        return table(ids)  # type: ignore[no-any-return]
    except IndexError:
        bad = ((ids < 0) | (ids >= vocabulary)).nonzero()
        if not len(bad):
            raise
        row, column = bad[0].tolist()
        raise ValueError(
            f"input_ids has token {int(ids[row, column])} at row {row}, column {column}, and this "
            f"model's vocabulary is 0 to {vocabulary - 1}: use the tokenizer that it was trained "
            "with, or a model of a larger vocab_size"
        ) from None


def document_borders(
    arguments: Mapping[str, Any],
    shape: tuple[int, int],  # B, T of the new tokens
    *,
    seen: int,
    mask: Tensor | None,  # positions are not checked at its zeros
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """Return ``cu_seqlens`` ``[N + 1]`` of all rows one after the other, or ``None``."""
    for name, value in arguments.items():
        if name not in HeadlessArguments.__annotations__:
            own = ("attention_mask", "cache", "labels", "cu_seqlens")
            known = [*HeadlessArguments.__annotations__, *own]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"the forward pass has no argument {name!r}{hint}")
        if name in _REFUSED and value is not None and bool(value) == _REFUSED[name][0]:
            raise ValueError(f"{name}={value}: {_REFUSED[name][1]}")
    kinds = arguments.get("token_type_ids")
    if kinds is not None and bool((torch.as_tensor(kinds) != 0).any()):
        raise ValueError("token_type_ids must be zeros: this model has one kind of token")
    B, T = shape
    _check_columns(arguments.get("cache_position"), seen, T)
    found: dict[str, Tensor] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        value = arguments.get(name)
        if value is not None:
            found[name] = torch.as_tensor(value)
    number = arguments.get("seq_idx")
    if number is not None:
        found["seq_idx"] = _changes(_table("seq_idx", number, B, T, rows=(B,)))
    positions = arguments.get("position_ids")
    if positions is not None:
        table = _table("position_ids", positions, B, T, rows=(1, B)).expand(B, T)
        begins = _begins(table, seen, mask)
        if begins is not None:
            found["position_ids"] = begins
    if cu_seqlens is not None:
        found = {"cu_seqlens": cu_seqlens, **found}
    return _one(found, mask, B, T)


def _check_columns(columns: Tensor | None, seen: int, T: int) -> None:
    if columns is None:
        return
    wanted = torch.arange(seen, seen + T)
    given = torch.as_tensor(columns).detach().cpu()
    if given.shape != wanted.shape or not bool((given == wanted).all()):
        raise ValueError(
            f"cache_position must count the columns from {seen} to {seen + T - 1}, those after the "
            "cache: a memory reads them in order"
        )


def _table(name: str, value: Any, B: int, T: int, *, rows: tuple[int, ...]) -> Tensor:
    table = torch.as_tensor(value)
    if table.dim() == 1:
        table = table[None]
    if table.dim() != 2 or table.shape[0] not in rows or table.shape[1] != T:
        wanted = " or ".join(str([count, T]) for count in dict.fromkeys(rows))
        raise ValueError(f"{name} must have shape {wanted}, not {list(table.shape)}")
    return table


def _begins(positions: Tensor, seen: int, mask: Tensor | None) -> Tensor | None:
    """Return ``cu_seqlens`` of restarting positions, or ``None`` if no position restarts."""
    B, T = positions.shape
    real = torch.ones_like(positions, dtype=torch.bool)
    if mask is not None and mask.dim() == 2 and mask.shape[1] >= T:
        real = mask[:, mask.shape[1] - T :].to(positions.device) != 0
    step = positions[:, 1:] - positions[:, :-1]
    pairs = real[:, 1:] & real[:, :-1]
    starts = pairs & (positions[:, 1:] == 0) & (step != 1)
    first = real & (real.cumsum(1) == 1)  # the first real token of each row
    if (
        bool((pairs & ~starts & (step != 1)).any())
        or (seen and bool(starts.any()))
        or (not seen and bool((positions[first] != 0).any()))
    ):
        raise ValueError(
            "position_ids may count a row's tokens from 0, start over where a document begins, or "
            "count on after a cache: a memory's positions are the order of its tokens"
        )
    if not bool(starts.any()):
        return None
    begins = torch.cat([torch.ones_like(starts[:, :1]), starts], 1).flatten().nonzero()[:, 0]
    return torch.cat([begins, begins.new_tensor([B * T])])


def _changes(number: Tensor) -> Tensor:
    """Return ``cu_seqlens`` of numbered documents."""
    B, T = number.shape
    other = torch.cat([torch.ones_like(number[:, :1]), number[:, 1:] - number[:, :-1]], 1) != 0
    begins = other.flatten().nonzero()[:, 0]
    return torch.cat([begins, begins.new_tensor([B * T])])


def _one(found: Mapping[str, Tensor], mask: Tensor | None, B: int, T: int) -> Tensor | None:
    """Return the boundaries that all arguments agree on."""
    if not found:
        return None
    name, borders = next(iter(found.items()))
    for other, told in found.items():
        if told.shape != borders.shape or not bool((told.cpu() == borders.cpu()).all()):
            raise ValueError(f"{name} and {other} name different borders of documents: give one")
    rows = torch.arange(0, (B + 1) * T, T)
    if B > 1 and not set(rows.tolist()) <= set(borders.tolist()):
        raise ValueError(
            f"{name} must have a border at every row's end, at {T}, {2 * T} and so on, because "
            "documents do not run on into the next row"
        )
    if B > 1 and mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            f"attention_mask has padding and {name} has borders of packed documents, and a batch "
            "has one or the other: pack rows that are full"
        )
    return borders
