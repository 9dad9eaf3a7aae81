"""What a caller hands over, looked at before anything else: one sentence says what to give."""

# What a caller hands over is not what its annotation says.
# pyright: reportUnnecessaryIsInstance=none

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.devices import holds, looks
from recollect.recipe.recipe import Recipe
from recollect.typing import Gates, Params
from recollect.wording import shown

__all__ = [
    "DENSE",
    "check_borders",
    "check_flags",
    "check_mask",
    "check_tensors",
    "layout",
    "named",
]


_SHAPES_ALONE = (
    "{name} moves tokens by its numbers, and tensors of the meta device and fake ones have shapes "
    "alone: leave it out, or give real tensors throughout"
)
DENSE = "give x.to_dense(), or x.to_padded_tensor(0) with an attention_mask"


def layout(x: Tensor) -> str:
    """What a tensor is that is not dense, for a message."""
    return "a nested one" if x.is_nested else f"one of layout {x.layout}"


def check_flags(**flags: object) -> None:
    """That flags are true or false: the word "no" would count as true.

    Raises:
        ValueError: naming the first that is neither.
    """
    for name, value in flags.items():
        if value is not True and value is not False:
            raise ValueError(f"{name} must be True or False, not {shown(value)}")


def check_tensors(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, devices and dtypes of q, k and v.

    Args:
        recipe: which says how many associations a token has.
        q: queries.
        k: keys.
        v: values.

    Raises:
        ValueError: with names and shapes.
    """
    n = recipe.associations
    keys = "[B, T, H, K]" if n == 1 else f"[B, T, H, {n}, K]"
    for name, x, want, dims in (
        ("q", q, "[B, T, H, K]", 4),
        ("k", k, keys, 4 + (n > 1)),
        ("v", v, keys.replace("K", "V"), 4 + (n > 1)),
    ):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor {want}, not {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            raise ValueError(f"{name} must be a dense tensor, not {layout(x)}: {DENSE}")
        if x.dim() != dims:
            raise ValueError(f"{name} must have shape {want}, not {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, not {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must share one dtype; {name} is {x.dtype} and q is {q.dtype}: cast "
                "them"
            )
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on one device; {name} is on {x.device} and q on {q.device}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in all axes but the last; k is {list(k.shape)} and v "
            f"{list(v.shape)}"
        )
    if n > 1 and k.shape[3] != n:
        raise ValueError(
            f"this recipe takes {n} associations per token, so k and v need axis 3 of size {n}, "
            "not "
            f"{k.shape[3]}"
        )
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q and k must agree in batch and tokens; q is {list(q.shape)} and k {list(k.shape)}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"queries and keys must have one size K; q has {q.shape[-1]} and k {k.shape[-1]}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, which must be a positive multiple of the {k.shape[2]} of "
            "k and v"
        )
    K, V = k.shape[-1], v.shape[-1]
    if K == 0 or V == 0:
        raise ValueError(f"keys and values need at least one channel; K = {K} and V = {V}")


def named(given: Gates | Params | None, what: str) -> Mapping[str, Tensor]:
    """Numbers by name; none where none are given.

    Args:
        given: gates or params as the caller gave them.
        what: ``"gates"`` or ``"params"``.

    Raises:
        ValueError: something else than a mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} must map names to tensors, not {type(given).__name__}")
    return given


def check_mask(mask: object, like: Tensor) -> None:
    """That an attention mask says which tokens of ``like [B, T, ...]`` are real, and nothing else.

    Raises:
        ValueError: another shape, values other than 0 and 1 (looked at on the CPU), or tensors that
            hold none.
    """
    B, T = like.shape[:2]
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (B, T):
        given = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have shape {[B, T]} [B, T], not {given}")
    if mask.layout is not torch.strided:
        raise ValueError(f"attention_mask must be a dense tensor, not {layout(mask)}: {DENSE}")
    if not (holds(mask) and holds(like)):
        raise ValueError(_SHAPES_ALONE.format(name="attention_mask"))
    if mask.dtype == torch.bool or not looks(mask):
        return
    odd = mask[(mask != 0) & (mask != 1)]
    if odd.numel():
        raise ValueError(
            "attention_mask must hold 1 at real tokens and 0 elsewhere, and holds "
            f"{odd[0].item():g}"
        )


def check_borders(borders: Tensor, k: Tensor) -> int:
    """How many documents packed in the one row of ``k [1, T, ...]`` have these borders.

    Raises:
        ValueError: borders that do not rise from 0 to T, or several rows.
    """
    if k.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents in one row, so B must be 1, not {k.shape[0]}")
    tensor = isinstance(borders, Tensor)
    if not tensor or borders.dim() != 1 or borders.numel() < 2 or borders.is_floating_point():
        raise ValueError("cu_seqlens must be a tensor of whole numbers [N + 1], from 0 to T")
    if not (holds(borders) and holds(k)):
        raise ValueError(_SHAPES_ALONE.format(name="cu_seqlens"))
    ends = borders.tolist()
    if ends[0] != 0 or ends[-1] != k.shape[1] or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {k.shape[1]} without falling, not {_short(ends)}"
        )
    return len(ends) - 1


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ...]"
