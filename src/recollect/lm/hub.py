"""Names of the hub: whether it answers is asked once, before anything is fetched from it.

Its own client asks again and again for half a minute and more, file by file.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["PATIENCE", "hub_options"]

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
    if Path(name).exists():
        return {}
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            return {}
        # Of whichever client the hub's package is built on, and of what is below it.
        except Exception:
            pass
    return {"local_files_only": True}
