"""`compare`: train several recipes at equal parameters and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.experiments.comparison.comparison import Comparison
from recollect.experiments.comparison.results import (
    DEFAULTS,
    ModelRun,
    NoProgress,
    ProgressReporter,
    Sizes,
)
from recollect.experiments.comparison.tasks import (
    RECALL_TASKS,
    TASKS,
    check_text_used,
    eval_sizes,
    read_corpus,
)
from recollect.experiments.comparison.training import (
    Job,
    RunOrError,
    run_jobs,
    training_environment,
)
from recollect.experiments.framework.task_models import with_short_conv
from recollect.fields import int_check, validate
from recollect.layer.options import LayerOptions
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import match_parameters, parameter_count
from recollect.messages import argument_name, renamed_arguments, short_repr
from recollect.recipe.recipe import Recipe
from recollect.report.devices import resolve_device
from recollect.tasks.text import TextCorpus, bigram_bits_per_byte, load_text
from recollect.zoo.preset import Preset, get

__all__ = [
    "SHARED_OPTIONS",
    "ModelSpec",
    "as_list",
    "build_configs",
    "compare",
    "resolve_model",
    "resolve_models",
    "resolve_sizes",
]

ModelSpec = str | Preset | tuple[str, Recipe] | tuple[str, Mixer] | tuple[str, Recipe, LayerOptions]
"""Zoo name, preset, or name and recipe or mixer, with layer options or without."""

SHARED_OPTIONS = (
    *(
        "conv_size",
        "conv_bias",
        "conv_activation",
        "conv_activation_on",
        "token_shift",
        "value_skip",
        "value_skip_per",
    ),
    *("output_norm", "norm_group_size", "norm_before_gate", "output_gate", "output_gate_rank"),
)
"""Options that do not depend on the memory: the layer applies them before or after it."""

MAX_SEEDS = 1000
"""Largest number of seeds of one comparison."""


def resolve_model(model: ModelSpec) -> tuple[str, dict[str, Mixer]]:
    """Return the name of a model and its mixers by name, from input to output."""
    if isinstance(model, tuple):
        name, *parts = model
        return name, {name: as_mixer(parts[0] if len(parts) == 1 else tuple(parts))}
    system = get(model) if isinstance(model, str) else model
    if not isinstance(system, Preset):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"compare: a model is a zoo name, a preset or (name, recipe), not {short_repr(model)}"
        )
    return system.name, dict(system.layers)


def resolve_models(
    models: Sequence[ModelSpec], layer_options: str
) -> list[tuple[str, Mapping[str, Mixer]]]:
    """Return the name and the mixers of each model, with the requested layer options."""
    if layer_options not in ("preset", "same"):
        raise ValueError(
            f"{argument_name('layer_options', 'compare: layer_options')} must be 'preset' "
            f"or 'same', not {short_repr(layer_options)}"
        )
    default = LayerOptions()
    shared: dict[str, Any] = {name: getattr(default, name) for name in SHARED_OPTIONS}

    def change(leaf: RecipeMixer) -> RecipeMixer:
        if leaf.options.persistent:  # a feed-forward layer has none of these options
            return leaf
        return replace(leaf, options=replace(leaf.options, **shared))

    def share(name: str, mixers: dict[str, Mixer]) -> tuple[str, Mapping[str, Mixer]]:
        changed = {key: mixer.map_leaves(change) for key, mixer in mixers.items()}
        return (name, mixers) if changed == mixers else (f"{name}-same", changed)

    resolved = [resolve_model(model) for model in models]
    return [share(*x) for x in resolved] if layer_options == "same" else [*resolved]


def compare(
    models: Sequence[ModelSpec] | str | Preset,
    tasks: Sequence[str] | str = TASKS,
    *,
    text: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    corpus: TextCorpus | None = None,
    sizes: Mapping[str, Sizes] | Sizes | None = None,
    seed: int = 0,
    seeds: int = 1,
    engine: str = "auto",
    layer_options: str = "preset",
    parameters: int | None = None,
    jobs: int = 1,
    device: str | None = None,
    progress: ProgressReporter | None = None,
) -> Comparison:
    """Train each model on each task at equal parameters and tokens.

    Args:
        models: Zoo names, presets, ``(name, recipe)``, ``(name, recipe, options)`` or ``(name,
            mixer)``; one model or a list.
        tasks: ``"text"``, ``"mqar"`` or ``"capacity"``; one task or a list.
        text: Files for the task text, as for `read_corpus`; by default the documentation installed
            with Python.
        corpus: Text in memory, in place of ``text``.
        sizes: Sizes by task in place of the defaults, or the sizes of the only task.
        seed: Seed of initial weights, examples and their order; 0 to 2³² − 1.
        seeds: Number of seeds, from ``seed`` on. Models share the examples of a seed. Results are
            means with their spread.
        engine: Engine, as in `recall`.
        layer_options: ``"preset"``: those of each model. ``"same"``: the default short
            convolution, output norm and output gate, no token shift and no value skip for all
            models. The name of a model that ``"same"`` changes ends in ``-same``. Options on which
            the memory depends, such as ``qk_norm`` and ``rope_theta``, are not changed.
        parameters: Number of parameters of every model; by default that of the largest model.
        jobs: Number of processes. Several have one thread each, which is faster for small models.
            They import the main module again, so a script must call `compare` under ``if __name__
            == "__main__":``, and your members must be in a module that registers them.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``; by default a GPU if there is one.
        progress: Receives the progress.

    Returns:
        The comparison. After a keyboard interrupt it contains the results up to then.

    Raises:
        ValueError: no model, a name twice, an unknown task or device, a text that no task uses, or
            an argument out of range.
        RecipeError: an unknown zoo name.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=16, depth=1, heads=1, length=48,
        ...     schedule=rc.experiments.Schedule(steps=2, batch=2, lr=1e-3),
        ... )
        >>> comparison = rc.compare(["linear_attention", "delta_net"], "mqar", sizes=sizes)
        >>> [(run.model, run.finished) for run in comparison.of("mqar")]
        [('linear_attention', True), ('delta_net', True)]
        >>> print(str(comparison).splitlines()[0])
        Recall: accuracy on multi-query associative recall (higher is better)
        >>> sorted(path.name for path in comparison.save("runs/two").values())[-1]
        'results.json'
    """
    specs = resolve_models(as_list("models", models), layer_options)
    names = [name for name, _ in specs]
    if not names:
        raise ValueError("compare: give at least one model")
    if len(set(names)) < len(names):
        raise ValueError(f"compare: a model is named twice in {', '.join(names)}")
    sizes = resolve_sizes(sizes, as_list("tasks", tasks))
    validate(argument_name("jobs", "compare: jobs"), int_check(1), jobs)
    validate(argument_name("seed", "compare: seed"), int_check(0, 2**32 - 1), seed)
    seeds_check = int_check(1, min(MAX_SEEDS, 2**32 - seed))
    validate(argument_name("seeds", "compare: seeds"), seeds_check, seeds)
    target_device = resolve_device(device, argument_name=argument_name("device", "compare: device"))
    check_text_used([*sizes], text=text, corpus=corpus)
    environment = training_environment(len(sizes) * len(names) * seeds, jobs, target_device)
    bigram, source = None, dict[str, str]()
    evaluated: dict[str, tuple[int, int]] = {}
    queue: list[Job] = []
    outcomes: dict[tuple[str, str], RunOrError] = {}
    interrupted = False
    try:
        if "text" in sizes:
            corpus = corpus or (load_text() if text is None else read_corpus(text))
            bigram = bigram_bits_per_byte(corpus)
            source = {"source": corpus.source, "sha256": corpus.sha256}
        for task, size in sizes.items():
            evaluated[task] = eval_sizes(task, size, corpus)
            is_recall = task in RECALL_TASKS
            data = RECALL_TASKS[task] if is_recall else corpus
            assert data is not None
            configs = build_configs(specs, data.vocab, size, engine, parameters, conv=is_recall)
            queue += [
                Job(
                    task=task,
                    model=name,
                    config=config,
                    size=size,
                    seed=seed + offset,
                    num_seeds=seeds,
                    device=str(target_device),
                )
                for offset in range(seeds)
                for name, config in zip(names, configs, strict=True)
            ]
        for job, outcome in run_jobs(queue, corpus, jobs, progress or NoProgress()):
            outcomes[job.task, job.label] = outcome
    except KeyboardInterrupt:
        interrupted = True
    keys = [(job.task, job.label) for job in queue]
    completed = [(key, outcomes[key]) for key in keys if key in outcomes]
    return Comparison(
        runs=tuple(x for _, x in completed if isinstance(x, ModelRun) and x.tokens),
        sizes=sizes,
        seed=seed,
        seeds=seeds,
        environment=environment,
        bigram=bigram,
        text=source,
        chance=RECALL_TASKS["mqar"].chance if "mqar" in sizes else None,
        interrupted=interrupted,
        processes=min(jobs, max(1, len(keys))),
        failures=tuple((*key, x) for key, x in completed if isinstance(x, str)),
        eval_sizes=evaluated,
    )


def as_list(name: str, values: Any, *, caller: str = "compare") -> Sequence[Any]:
    """Return a list of models or tasks, also if one is given alone."""
    if isinstance(values, str | Preset):
        return [values]
    if not isinstance(values, Sequence):
        raise ValueError(f"{caller}: {name} must be a list, not {short_repr(values)}")
    return values


def resolve_sizes(
    sizes: Mapping[str, Sizes] | Sizes | None, tasks: Sequence[str], *, caller: str = "compare"
) -> dict[str, Sizes]:
    """Return the sizes by task; those of the only task may be given alone."""
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"{caller}: unknown task {task!r}; there are {', '.join(TASKS)}")
    if isinstance(sizes, Sizes):
        if len(set(tasks)) != 1:
            raise ValueError(
                f"{caller}: sizes are per task if there are several: give them by task, as in "
                f"sizes={{{next(iter(tasks), 'text')!r}: Sizes(...)}}"
            )
        sizes = {tasks[0]: sizes}
    sizes = {} if sizes is None else sizes
    if not isinstance(sizes, Mapping) or not all(isinstance(x, Sizes) for x in sizes.values()):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"{caller}: sizes are an rc.experiments.Sizes, or a dict of them by task, not "
            f"{short_repr(sizes)}"
        )
    return {task: sizes.get(task, DEFAULTS[task]) for task in tasks}


@renamed_arguments(
    {
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "head_dim": "",  # all layers divide the width among their heads
        "target": "parameters",
    }
)
def build_configs(
    specs: Sequence[tuple[str, Mapping[str, Mixer]]],
    vocab: int,
    size: Sizes,
    engine: str,
    parameters: int | None,
    *,
    conv: bool,
) -> list[RecollectConfig]:
    """Return configurations of equal size, with MLPs as wide as equal parameters require.

    Without ``parameters``, every model has as many as the largest. If ``conv``, every model has a
    short convolution. A model with more parameters even with the narrowest MLP raises an error.
    """
    configs = [
        RecollectConfig.from_recipes(
            {name: _prepare_mixer(mixer, size, conv=conv) for name, mixer in mixers.items()},
            vocab_size=vocab,
            hidden_size=size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            head_dim=size.head_dim,
            engine=engine,
        )
        for _, mixers in specs
    ]
    # The largest model is the target, so that no model loses parameters that its recipe needs.
    return match_parameters(configs, parameters or max(map(parameter_count, configs)))


def _prepare_mixer(mixer: Mixer, size: Sizes, *, conv: bool) -> Mixer:
    """Set the key size if the preset has none, and a short convolution as in zoology.

    If one part of a composition has a convolution, the others are unchanged.
    """
    if conv and not any(leaf.options.conv_size for leaf in mixer.leaves.values()):
        mixer = with_short_conv(mixer)

    def prepare(leaf: RecipeMixer) -> RecipeMixer:
        if leaf.options.key_dim is not None or size.key_dim is None:
            return leaf
        return replace(leaf, options=replace(leaf.options, key_dim=size.key_dim))

    return mixer.map_leaves(prepare)
