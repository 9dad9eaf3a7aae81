"""Check that the Hugging Face Hub is reachable before downloading from it.

The client of the hub retries every file for half a minute and more.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["PATIENCE", "hub_answers", "hub_options", "offline", "replaced"]

PATIENCE = 5.0
"""Timeout of the request to the hub in seconds."""


def hub_options(name: str) -> dict[str, bool]:
    """Return ``local_files_only=True`` for ``from_pretrained`` if the hub cannot be reached."""
    return {} if Path(name).exists() or hub_answers() else {"local_files_only": True}


def hub_answers() -> bool:
    """Return whether the hub answers one request; False in the offline mode of its client."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # the type depends on the HTTP client of huggingface_hub
        return False
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Context manager that keeps the hub offline, also for adapters and data sets."""
    from huggingface_hub import constants

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(constants, "HF_HUB_OFFLINE", True))
        if "datasets" in sys.modules:  # it copies the flag when it is imported
            stack.enter_context(replaced(sys.modules["datasets"].config, "HF_HUB_OFFLINE", True))
        yield


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that replaces an attribute of a module."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
