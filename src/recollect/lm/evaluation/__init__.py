"""Evaluation of language models with lm-eval: its tasks, and tasks of ours that need no network.

`evaluate` is the face; `harness` runs a model under lm-eval, `names` finds and loads tasks,
`documents` makes the documents of the tasks in ``local/``, `results` and `folder` keep what was
measured.
"""
