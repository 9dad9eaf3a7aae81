"""Names of devices."""

from __future__ import annotations

import torch

__all__ = ["available_devices", "resolve_device"]


def available_devices() -> list[str]:
    """Return the names of the devices that torch sees: ``"cpu"``, ``"cuda:0"``, ``"mps"``, ..."""
    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type not in ("cuda", "mps"):
        names += [f"{other.type}:{index}" for index in range(torch.accelerator.device_count())]
    return names


def resolve_device(name: str | None, *, argument_name: str) -> torch.device:
    """Return the device of a name.

    Args:
        name: ``"cpu"``, ``"cuda"`` (the first), ``"cuda:1"``, ``"mps"``. ``None`` selects the
            accelerator, or the CPU if there is none.
        argument_name: Name of the option or argument, for the error message.

    Raises:
        ValueError: Torch does not see the device.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    available = available_devices()
    if name in available:
        return torch.device(name)
    if f"{name}:0" in available:  # a type of device without an index selects the first
        return torch.device(name, 0)
    raise ValueError(
        f"{argument_name} {name!r} is not here: torch sees {', '.join(available)}; name one of "
        "these, or leave it out"
    )
