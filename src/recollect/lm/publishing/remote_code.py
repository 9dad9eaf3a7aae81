"""The file by which transformers loads a saved model with ``trust_remote_code=True``.

It imports recollect and defines nothing. ``auto_map`` in ``config.json`` names its classes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["RemoteConfig", "is_external_class", "set_remote_code"]

_MODULE = "modeling_recollect"


def set_remote_code(config: Any, remote_code: bool) -> None:
    """Add the classes of the remote code to a configuration, or remove them."""
    if remote_code:
        config.auto_map = {
            auto: f"{_MODULE}.{name}" for auto, name in config.remote_classes.items()
        }
    elif hasattr(config, "auto_map"):
        del config.auto_map


class RemoteConfig:
    """A mixin for a configuration, which saves the remote code with each ``auto_map`` to it."""

    # names of classes in the file, by the automatic class that loads them
    remote_classes: ClassVar[dict[str, str]]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Register a class as transformers does, unless it is part of recollect."""
        if is_external_class(cls):
            super().register_for_auto_class(auto_class)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, with the remote code if ``auto_map`` names it.

        Args:
            save_directory: the folder.
            args, kwargs: as in transformers.
        """
        auto_map = getattr(self, "auto_map", None)
        name = auto_map.get("AutoConfig") if isinstance(auto_map, Mapping) else None
        # For a model from the hub, transformers puts the repository before the name.
        if str(name).rpartition("--")[2].startswith(f"{_MODULE}."):
            set_remote_code(self, True)
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(__file__).with_name(f"{_MODULE}.py"), folder / f"{_MODULE}.py")
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


def is_external_class(kind: type) -> bool:
    """Whether transformers may save the code of a class, which is not part of recollect."""
    return not kind.__module__.startswith("recollect.")
