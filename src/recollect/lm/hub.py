"""Check that the Hugging Face Hub is reachable before downloading from it.

The client of the hub retries every file for half a minute and more.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

__all__ = ["is_hub_reachable", "offline", "offline_kwargs", "patched_attribute"]

HUB_TIMEOUT_SECONDS = 5.0


def offline_kwargs(name: str) -> dict[str, bool]:
    """Return ``local_files_only=True`` for ``from_pretrained`` if the hub cannot be reached."""
    return {} if Path(name).exists() or is_hub_reachable() else {"local_files_only": True}


def is_hub_reachable() -> bool:
    """Return whether the hub is reachable; False in the offline mode of its client."""
    minute = int(time.monotonic() // 60)  # a lost connection may come back
    return not constants.HF_HUB_OFFLINE and _responds(constants.ENDPOINT, minute)


@functools.lru_cache(maxsize=1)
def _responds(url: str, minute: int) -> bool:
    """Return whether a server responds in a given minute of the process."""
    del minute  # only a key of the cache
    try:
        huggingface_hub.get_session().head(url, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # the type depends on the HTTP client of huggingface_hub
        return False
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Context manager that keeps the hub offline, also for adapters and data sets."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched_attribute(constants, "HF_HUB_OFFLINE", True))
        if "datasets" in sys.modules:  # it copies the flag when it is imported
            config = sys.modules["datasets"].config
            stack.enter_context(patched_attribute(config, "HF_HUB_OFFLINE", True))
        yield


@contextlib.contextmanager
def patched_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager that replaces an attribute of a module."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
