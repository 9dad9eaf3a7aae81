"""States as flat names and plain tensors, as safetensors holds them: what is read back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.typing import Weights
from recollect.wording import shown

__all__ = ["check_names", "numbered", "read_text", "text_tensor"]

PARTS = (
    *("position", "sizes", "ones", "log_scale", "written_by"),
    *("buffer.k", "buffer.v", "buffer.mask", "dual.k", "dual.mass", "dual.mask"),
)
GROUPS = ("weights.", "slots.", "buffer.rates.", "dual.rows.", "dual.slots.")


def check_names(flat: Mapping[str, Tensor]) -> None:
    """That every name is one that a state has, and stands for a tensor.

    Raises:
        ValueError: no tensors by name, a name that no state has, or a part that is missing.
    """
    if not isinstance(flat, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"a state is read from tensors by name, not from {shown(flat)}")
    for name in flat:
        if not (name in PARTS or name.startswith(GROUPS)):
            raise ValueError(f"{name!r} is no part of a recollect state")
        if not isinstance(flat[name], Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name!r} of a state must be a tensor, not {shown(flat[name])}")
    needed = ["position", "sizes"]
    if any(name.startswith("buffer.") for name in flat):
        needed += ["buffer.k", "buffer.v", "buffer.mask"]
    if any(name.startswith("dual.") for name in flat):
        needed += ["dual.k", "dual.mass", "dual.mask"]
    for name in needed:
        if name not in flat:
            raise ValueError(f"this is no recollect state: it has no {name!r}")
    if list(flat["sizes"].shape) != [3]:
        raise ValueError("'sizes' of a state must be the three numbers H, K, V")


def numbered(flat: Mapping[str, Tensor], prefix: str) -> Weights:
    """The tensors ``prefix0``, ``prefix1``, ... in order.

    Args:
        flat: tensors by name.
        prefix: of their names.

    Raises:
        ValueError: something else than a number after the prefix, or a number that is missing.
    """
    by_index: dict[int, Tensor] = {}
    for name, x in flat.items():
        if name.startswith(prefix):
            index = name[len(prefix) :]
            if not index.isdecimal():
                raise ValueError(f"{name!r} is no part of a recollect state")
            by_index[int(index)] = x
    for index in range(len(by_index)):
        if index not in by_index:
            beside = f"{prefix}{max(by_index)}"
            raise ValueError(f"this state lacks the tensor {prefix}{index}: it has {beside}")
    return tuple(by_index[i] for i in sorted(by_index))


def text_tensor(text: str) -> Tensor:
    """Text as a tensor of its bytes."""
    return torch.tensor([*text.encode()], dtype=torch.uint8)


def read_text(flat: Mapping[str, Tensor], name: str) -> str | None:
    """The text of a tensor of bytes; ``None`` where there is none of that name.

    Args:
        flat: tensors by name.
        name: of the tensor.

    Raises:
        ValueError: no bytes, or other numbers than bytes of UTF-8.
    """
    x = flat.get(name)
    if x is None:
        return None
    try:
        if x.dtype == torch.uint8 and x.dim() == 1 and len(x):
            return bytes(x.tolist()).decode()
    except UnicodeDecodeError:
        pass
    raise ValueError(f"{name!r} of a state must be text, as one row of its bytes in UTF-8")
