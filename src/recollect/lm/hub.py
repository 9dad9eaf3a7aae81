"""Names of the hub: whether it answers is asked once, before anything is fetched from it.

Its own client asks again and again for half a minute and more, file by file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["PATIENCE", "hub_answers", "hub_options", "offline", "replaced"]

PATIENCE = 5.0
"""Seconds in which the hub has to answer."""


def hub_options(name: str) -> dict[str, bool]:
    """How ``from_pretrained`` is to look for a name: a hub that does not answer is not asked.

    Args:
        name: of a folder, which is all that is looked at where it is there, or on the hub.

    Returns:
        Arguments of ``from_pretrained``: ``local_files_only=True`` (what was fetched before is
        found still) where the hub does not answer, and nothing otherwise.
    """
    return {} if Path(name).exists() or hub_answers() else {"local_files_only": True}


def hub_answers() -> bool:
    """Whether the hub answers, asked once; not where the environment says to stay offline."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # of whichever client the hub's package is built on, and of what is below it
        return False
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Ask nothing of the hub for a while; what was fetched before is found.

    Where names may be looked up that no ``local_files_only`` reaches, such as adapters and data.
    """
    from huggingface_hub import constants

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(constants, "HF_HUB_OFFLINE", True))
        if "datasets" in sys.modules:  # which has its own from the moment of its import
            stack.enter_context(replaced(sys.modules["datasets"].config, "HF_HUB_OFFLINE", True))
        yield


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let a module have another value under a name for a while.

    Args:
        module: of any package.
        name: that it has.
        value: for the while.
    """
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
