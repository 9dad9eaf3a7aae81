"""Evaluation of language models with lm-eval: its tasks, and local tasks that need no network.

`evaluate` is the interface. `harness` runs a model under lm-eval, `names` finds and loads tasks,
`documents` generates the documents of the tasks in ``local/``, `results` and `folder` store
results.
"""
