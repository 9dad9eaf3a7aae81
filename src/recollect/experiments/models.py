"""Moved to `recollect.experiments.framework.task_models`."""

from recollect.moved import alias

alias(__name__, "recollect.experiments.framework.task_models")
