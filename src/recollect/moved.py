"""Old names of documented modules that moved; they last for one release."""

from __future__ import annotations

import importlib
import sys
import warnings

__all__ = ["alias"]


def alias(old: str, new: str) -> None:
    """Make the module that is being imported as ``old`` the one that is called ``new`` now.

    Args:
        old: the name of the file that calls this, ``__name__``.
        new: the module's path.
    """
    # The importer of the old name is the second frame outside of the import system.
    warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=3)
    sys.modules[old] = importlib.import_module(new)
