"""Interpret the extra keyword arguments that transformers passes to ``forward``.

Trainers and collators pass arguments meant for attention. Redundant ones are accepted, document
boundaries are converted to ``cu_seqlens``, and anything that a memory cannot follow raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.messages import suggestion

__all__ = [
    "ForwardKwargs",
    "check_token_ids",
    "cu_seqlens_from_starts",
    "embed_tokens",
    "resolve_cu_seqlens",
]


class ForwardKwargs(TypedDict, total=False):
    """Further arguments of a forward pass, with transformers' names.

    Of several arguments that locate documents, the first of ``cu_seqlens``, ``cu_seq_lens_q``,
    ``cu_seq_lens_k``, ``seq_idx`` and ``position_ids`` is used.
    """

    position_ids: Tensor | None  # [B or 1, T], from 0 in every document; ignored at padding
    cache_position: Tensor | None  # [T], positions of the batch, counted on after the cache
    cu_seq_lens_q: Tensor | None  # [N + 1], boundaries of documents, as cu_seqlens
    cu_seq_lens_k: Tensor | None
    seq_idx: Tensor | None  # [B, T], number of each token's document
    max_length_q: int | None  # length of the longest document; ignored
    max_length_k: int | None
    output_attentions: bool | None  # not true: there are no attention weights
    output_router_logits: bool | None  # not true: aux_loss has the loss of routers
    is_causal: bool | None  # not false: a memory depends on earlier tokens only
    token_type_ids: Tensor | None  # zeros: there is one kind of token
    return_dict: bool | None  # whether to return an output object (the default) or a tuple


_NAMES = (*ForwardKwargs.__annotations__, "num_items_in_batch")  # without a head, it is ignored
_UNSUPPORTED: dict[str, tuple[bool, str]] = {
    "output_attentions": (True, "a memory has no attention weights to return: leave it out"),
    "output_router_logits": (True, "logits of routers are not returned: use aux_loss instead"),
    "is_causal": (False, "a memory depends on earlier tokens only: leave it out"),
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


def embed_tokens(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    """Return the vectors ``[B, T, D]`` of tokens ``[B, T]``.

    An id out of range raises ValueError on a CPU. A GPU would need a synchronisation to check it.
    """
    check_token_ids(ids)
    if torch.compiler.is_compiling():
        return embedding(ids)  # type: ignore[no-any-return]
    try:
        return embedding(ids)  # type: ignore[no-any-return]
    except IndexError:
        vocab_size = embedding.weight.shape[0]  # adapters have a weight, but no num_embeddings
        invalid = ((ids < 0) | (ids >= vocab_size)).nonzero()
        if not len(invalid):
            raise
        row, column = invalid[0].tolist()
        raise ValueError(
            f"input_ids has token {int(ids[row, column])} at row {row}, column {column}, and this "
            f"model's vocabulary is 0 to {vocab_size - 1}: use the tokenizer that it was trained "
            "with, or a model of a larger vocab_size"
        ) from None


def cu_seqlens_from_starts(starts: Tensor) -> Tensor:
    """Return boundaries ``[N + 1]`` in the flattened batch; every row starts a document.

    ``starts [B, T − 1]`` is whether each token after the first starts a document.
    """
    starts = functional.pad(starts, (1, 0), value=True).flatten()
    return functional.pad(starts.nonzero()[:, 0], (0, 1), value=starts.numel())


def resolve_cu_seqlens(
    kwargs: Mapping[str, Any],
    shape: tuple[int, int],  # B, T of the new tokens
    *,
    past_length: int,
    mask: Tensor | None,  # positions are not checked at its zeros
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """Check `ForwardKwargs`; return ``cu_seqlens`` ``[N + 1]`` of the flattened batch, if any."""
    for name, value in kwargs.items():
        if name not in _NAMES:
            hint = suggestion(name, [*_NAMES, "attention_mask", "cache", "labels", "cu_seqlens"])
            raise TypeError(f"the forward pass has no argument {name!r}; {hint}")
        if name in _UNSUPPORTED and value is not None and bool(value) == _UNSUPPORTED[name][0]:
            raise ValueError(f"{name}={value}: {_UNSUPPORTED[name][1]}")
    token_types = kwargs.get("token_type_ids")
    if token_types is not None and bool((torch.as_tensor(token_types) != 0).any()):
        raise ValueError("token_type_ids must be zeros: this model has one kind of token")
    B, T = shape
    _check_cache_position(kwargs.get("cache_position"), past_length, T)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "position_ids")
    name = next((name for name in names if kwargs.get(name) is not None), None)
    if cu_seqlens is not None or name is None:
        return cu_seqlens
    value = torch.as_tensor(kwargs[name])
    if name.startswith("cu_seq_lens"):
        return value
    value = value[None] if value.dim() == 1 else value
    num_rows = (B,) if name == "seq_idx" else (1, B)
    if value.dim() != 2 or value.shape[0] not in num_rows or value.shape[1] != T:
        shapes = " or ".join(str([n, T]) for n in dict.fromkeys(num_rows))
        raise ValueError(f"{name} must have shape {shapes}, not {list(value.shape)}")
    if name == "seq_idx":
        return cu_seqlens_from_starts(value[:, 1:] != value[:, :-1])
    return _cu_seqlens_from_position_ids(value.expand(B, T), past_length, mask)


def _check_cache_position(positions: Tensor | None, past_length: int, T: int) -> None:
    if positions is None:
        return
    positions = torch.as_tensor(positions)
    expected = torch.arange(past_length, past_length + T, device=positions.device)
    if positions.shape != expected.shape or not bool((positions == expected).all()):
        raise ValueError(
            f"cache_position must count from {past_length} to {past_length + T - 1}, on after the "
            "cache: a memory reads tokens in order"
        )


def _cu_seqlens_from_position_ids(
    positions: Tensor,  # [B, T]
    past_length: int,
    mask: Tensor | None,
) -> Tensor | None:
    """Return ``cu_seqlens`` of positions that restart, or ``None`` if none restarts."""
    valid = torch.ones_like(positions, dtype=torch.bool)
    if mask is not None and mask.dim() == 2 and mask.shape[1] >= positions.shape[1]:
        valid = mask[:, mask.shape[1] - positions.shape[1] :].to(positions.device) != 0
    jumps = valid[:, 1:] & valid[:, :-1] & (positions.diff(dim=1) != 1)
    starts = jumps & (positions[:, 1:] == 0)
    invalid = (jumps & ~starts).any()
    if past_length:
        invalid = invalid | starts.any()
    else:
        is_first = valid & (valid.cumsum(1) == 1)  # the first valid token of each row
        invalid = invalid | (is_first & (positions != 0)).any()
    is_invalid, has_starts = torch.stack([invalid, starts.any()]).tolist()  # one synchronisation
    if is_invalid:
        raise ValueError(
            "position_ids must count the tokens of a row from 0, restart at 0 where a document "
            "begins, or count on after a cache: a memory's positions are the order of its tokens"
        )
    return cu_seqlens_from_starts(starts) if has_starts else None
