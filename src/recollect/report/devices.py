"""Devices by name: which there are, and a refusal of those that there are not."""

from __future__ import annotations

import torch

__all__ = ["devices_here", "find_device"]


def devices_here() -> list[str]:
    """Names of the devices that torch sees: ``"cpu"``, ``"cuda:0"``, ``"mps"``, ..."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type not in ("cuda", "mps"):
        found += [f"{other.type}:{index}" for index in range(torch.accelerator.device_count())]
    return found


def find_device(name: str | None, *, said: str) -> torch.device:
    """A device by name; the accelerator that there is, else the CPU, without one.

    Args:
        name: ``"cpu"``, ``"cuda"`` (the first), ``"cuda:1"``, ``"mps"``.
        said: what the user calls it, for messages.

    Raises:
        ValueError: torch sees no such device here.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    there = devices_here()
    if name in there:
        return torch.device(name)
    if f"{name}:0" in there:  # a kind of device; a process without another word has the first
        return torch.device(name, 0)
    raise ValueError(
        f"{said} {name!r} is not here: torch sees {', '.join(there)}; name one of these, or leave "
        "it out"
    )
