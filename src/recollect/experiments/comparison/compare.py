"""`compare`: train several recipes at equal parameters and tokens, and judge them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.experiments.comparison.comparison import Comparison
from recollect.experiments.comparison.jobs import Job, run_jobs, training_environment
from recollect.experiments.comparison.results import (
    DEFAULTS,
    ModelRun,
    Nobody,
    Sizes,
    Watcher,
)
from recollect.experiments.comparison.tasks import (
    RECALLS,
    TASKS,
    check_text_is_read,
    measured,
    read_corpus,
)
from recollect.fields import int_check, validate
from recollect.layer.options import LayerOptions
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import match_parameters, parameter_count
from recollect.messages import argument_name, renamed_arguments, short_repr
from recollect.recipe.recipe import Recipe
from recollect.report.devices import resolve_device
from recollect.tasks.text import TextCorpus, bigram_bits_per_byte, load_text
from recollect.zoo.preset import Preset, get

__all__ = ["Named", "compare", "equal_configs", "named", "named_alike"]

Named = str | Preset | tuple[str, Recipe] | tuple[str, Mixer] | tuple[str, Recipe, LayerOptions]
"""A zoo name, a preset, or a recipe or mixer of one's own under a name, with its options or not."""


def named(model: Named) -> tuple[str, dict[str, Mixer]]:
    """The model's name, and its mixers by name in the order in which they stand over the depth."""
    if isinstance(model, tuple):
        name, *stated = model
        return name, {name: as_mixer(stated[0] if len(stated) == 1 else tuple(stated))}
    system = get(model) if isinstance(model, str) else model
    if not isinstance(system, Preset):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"compare: a model is a zoo name, a preset or (name, recipe), not {short_repr(model)}"
        )
    return system.name, dict(system.layers)


SHARED = ("conv_size", "conv_activation", "token_shift", "value_skip", "output_norm", "output_gate")
"""Options that every layer can have alike: the layer applies them before or after its memory."""


def named_alike(
    models: Sequence[Named], layer_options: str
) -> list[tuple[str, Mapping[str, Mixer]]]:
    """Return the name and the mixers of each model, with the requested layer options.

    Args:
        models: as in `compare`.
        layer_options: ``"preset"`` or ``"same"``, as in `compare`.

    Raises:
        ValueError: another value of ``layer_options``.
    """
    if layer_options not in ("preset", "same"):
        raise ValueError(
            f"{argument_name('layer_options', 'compare: layer_options')} must be 'preset' "
            "or 'same', "
            f"not {short_repr(layer_options)}"
        )
    chosen = [named(model) for model in models]
    return [_alike(*one) for one in chosen] if layer_options == "same" else [*chosen]


def _alike(name: str, layers: Mapping[str, Mixer]) -> tuple[str, Mapping[str, Mixer]]:
    """Set the `SHARED` options of all layers to their defaults, and mark a changed model's name."""
    default = LayerOptions()
    shared: dict[str, Any] = {option: getattr(default, option) for option in SHARED}

    def change(leaf: RecipeMixer) -> RecipeMixer:
        if leaf.options.persistent:  # a feed-forward layer has none of these options
            return leaf
        return replace(leaf, options=replace(leaf.options, **shared))

    changed = {key: mixer.map_leaves(change) for key, mixer in layers.items()}
    return (name, layers) if changed == dict(layers) else (f"{name}-same", changed)


SEEDS = 1000
"""The most seeds of one comparison: every model is trained with each."""


def compare(
    models: Sequence[Named] | str | Preset,
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
    watcher: Watcher | None = None,
) -> Comparison:
    """Train each model on each task at equal parameters and tokens.

    Args:
        models: zoo names, presets, or ``(name, recipe)``, ``(name, recipe, options)`` or ``(name,
            mixer)`` of your own.
        tasks: out of `TASKS`; one stands for a list of one, as a name does among ``models``.
        text: texts of your own, for the task text, as `read_corpus` takes them; the default is the
            documentation installed with Python.
        corpus: a text already read, instead of ``text``.
        sizes: per task, in place of `DEFAULTS`; where there is one task, its sizes alone will do.
        seed: of initial weights, examples and their order; 0 to 2³² − 1.
        seeds: how many; every model is trained anew with ``seed``, ``seed`` + 1, ... and reported
            by mean and spread over them. Models share the examples of a seed.
        engine: engine, as in `recall`.
        layer_options: ``"preset"``: each model keeps its own; ``"same"``: all layers have the
            default short convolution, output norm and output gate, no token shift and no skip of
            the values. The name of a model that ``"same"`` changes ends in ``-same``. Options on
            which the memory depends, such as ``qk_norm`` and ``rope``, remain the model's own.
        parameters: that every model is brought to; the largest model's when omitted. Runs that give
            the same number can be laid side by side.
        jobs: processes, each with one thread when there are several. Small models are trained
            faster so: two processes get more done than one with two threads. They begin by
            importing the main module again, so a script calls this under ``if __name__ ==
            "__main__":``, and members of one's own stand in a module that registers them.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``; a GPU if there is one, by default.
        watcher: told about progress.

    Returns:
        The comparison. A keyboard interrupt ends it early and is noted in it; nothing measured is
        lost.

    Raises:
        ValueError: no models, a name twice, an unknown task, a text that no task reads, no process
            to train them in, no seed, or a device that is not here.
        RecipeError: an unknown zoo name.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=16, depth=1, heads=1, length=48,
        ...     schedule=rc.experiments.Schedule(steps=2, batch=2, lr=1e-3),
        ... )
        >>> found = rc.compare(["linear_attention", "delta_net"], "mqar", sizes=sizes)
        >>> [(run.model, run.finished) for run in found.of("mqar")]
        [('linear_attention', True), ('delta_net', True)]
        >>> print(str(found).splitlines()[0])
        Recall: accuracy on multi-query associative recall (higher is better)
        >>> sorted(path.name for path in found.save("runs/two").values())[-1]
        'results.json'
    """
    models = [models] if isinstance(models, str | Preset) else models
    tasks = [tasks] if isinstance(tasks, str) else tasks
    for what, several in (("models", models), ("tasks", tasks)):
        if not isinstance(several, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"compare: {what} must be a list, not {short_repr(several)}")
    chosen = named_alike(models, layer_options)
    names = [name for name, _ in chosen]
    if not chosen:
        raise ValueError("compare: give at least one model")
    if len(set(names)) < len(names):
        raise ValueError(f"compare: a model is named twice in {', '.join(names)}")
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"compare: unknown task {task!r}; there are {', '.join(TASKS)}")
    validate(argument_name("jobs", "compare: jobs"), int_check(1), jobs)
    validate(argument_name("seed", "compare: seed"), int_check(0, 2**32 - 1), seed)
    validate(
        argument_name("seeds", "compare: seeds"), int_check(1, min(SEEDS, 2**32 - seed)), seeds
    )
    target_device = resolve_device(device, argument_name=argument_name("device", "compare: device"))
    check_text_is_read(tasks, text=text, corpus=corpus)
    by_task = _by_task(sizes, tasks)
    every = {task: by_task.get(task, DEFAULTS[task]) for task in dict.fromkeys(tasks)}
    bigram = None
    facts: dict[str, str] = {}
    amounts: dict[str, tuple[int, int]] = {}
    runs: dict[tuple[str, str], ModelRun] = {}
    failures: list[tuple[str, str, str]] = []
    wanted: list[Job] = []
    environment = training_environment(len(every) * len(chosen) * seeds, jobs, target_device)
    interrupted = False
    try:
        if "text" in every:
            corpus = corpus or (load_text() if text is None else read_corpus(text))
            bigram = bigram_bits_per_byte(corpus)
            facts = {"source": corpus.source, "sha256": corpus.sha256}
        for task, size in every.items():
            amounts[task] = measured(task, size, corpus)
            recall = RECALLS.get(task)
            if recall is not None:
                vocab = recall.vocab
            else:
                assert corpus is not None
                vocab = corpus.vocab
            told = recall is not None
            configs = equal_configs(chosen, vocab, size, engine, parameters, conv=told)
            wanted += [
                Job(
                    task=task,
                    model=name,
                    config=config,
                    size=size,
                    seed=number,
                    several=seeds > 1,
                    device=str(target_device),
                )
                for number in range(seed, seed + seeds)
                for name, config in zip(names, configs, strict=True)
            ]
        for job, outcome in run_jobs(wanted, corpus, jobs, watcher or Nobody()):
            if isinstance(outcome, ModelRun):
                if outcome.tokens:
                    runs[job.task, job.label] = outcome
            else:  # the others are worth having; the reason stands in the report
                failures.append((job.task, job.label, outcome))
    except KeyboardInterrupt:
        interrupted = True
    asked = [(job.task, job.label) for job in wanted]
    return Comparison(
        runs=tuple(runs[key] for key in asked if key in runs),
        sizes=every,
        seed=seed,
        seeds=seeds,
        environment=environment,
        bigram=bigram,
        text=facts,
        chance=RECALLS["mqar"].chance if "mqar" in every else None,
        interrupted=interrupted,
        processes=min(jobs, max(1, len(asked))),
        failures=tuple(sorted(failures, key=lambda failure: asked.index(failure[:2]))),
        measured=amounts,
    )


def _by_task(
    sizes: Mapping[str, Sizes] | Sizes | None, tasks: Sequence[str]
) -> Mapping[str, Sizes]:
    """Sizes by task; those of the only task may be given alone.

    Raises:
        ValueError: one for several tasks, or something else.
    """
    if isinstance(sizes, Sizes):
        if len(set(tasks)) != 1:
            raise ValueError(
                "compare: sizes are per task where there are several: give them by task, as in "
                f"sizes={{{next(iter(tasks), 'text')!r}: Sizes(...)}}"
            )
        return {tasks[0]: sizes}
    if sizes is None:
        return {}
    if not isinstance(sizes, Mapping) or not all(isinstance(x, Sizes) for x in sizes.values()):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"compare: sizes are an rc.experiments.Sizes, or a dict of them by task, not "
            f"{short_repr(sizes)}"
        )
    return sizes


@renamed_arguments(
    {
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "head_dim": "",  # all layers divide the width among their heads
        "target": "parameters",
    }
)
def equal_configs(
    chosen: Sequence[tuple[str, Mapping[str, Mixer]]],
    vocab: int,
    size: Sizes,
    engine: str,
    parameters: int | None,
    *,
    conv: bool,
) -> list[RecollectConfig]:
    """Configurations of models of one size, their MLPs as wide as equal parameters want them.

    Args:
        chosen: names and mixers of each model, as `named` gives them.
        vocab: tokens.
        size: of the models.
        engine: engine, as in `recall`.
        parameters: that every model is brought to; the largest model's when ``None``.
        conv: whether every layer has a short convolution.

    Raises:
        ValueError: a model that has more parameters even with the narrowest MLP.
    """
    configs = [
        RecollectConfig.from_recipes(
            {name: _fitted(mixer, size, conv=conv) for name, mixer in layers.items()},
            vocab_size=vocab,
            hidden_size=size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            head_dim=size.head_dim,
            engine=engine,
        )
        for _, layers in chosen
    ]
    # All are brought to the largest, so that no model loses what its recipe needs.
    target = parameters or max(parameter_count(config) for config in configs)
    return match_parameters(configs, target)


def _fitted(mixer: Mixer, size: Sizes, *, conv: bool) -> Mixer:
    """A mixer with keys of the asked size, and with a short convolution where the task wants it.

    A composition that has one already keeps its other parts as they are.
    """
    adds_conv = conv and not any(leaf.options.conv_size for leaf in mixer.leaves.values())

    def fit(leaf: RecipeMixer) -> RecipeMixer:
        options = _with_conv(leaf.options) if adds_conv else leaf.options
        return replace(leaf, options=_sized(options, size))

    return mixer.map_leaves(fit)


def _with_conv(options: LayerOptions) -> LayerOptions:
    """Recall is told to every model with a short convolution, as in the zoology benchmark."""
    return options if options.conv_size else replace(options, conv_size=4)


def _sized(options: LayerOptions, size: Sizes) -> LayerOptions:
    """Keys of the asked size, where the preset has none of its own."""
    if size.key_dim is None or options.key_dim is not None:
        return options
    return replace(options, key_dim=size.key_dim)
