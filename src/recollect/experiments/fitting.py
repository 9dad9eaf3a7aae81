"""Moved to `recollect.experiments.framework.fitting`."""

from recollect.moved import alias

alias(__name__, "recollect.experiments.framework.fitting")
