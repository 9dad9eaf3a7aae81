"""`search`: draw recipes near a start, and train the promising ones longer."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path

from recollect.blocks.mixers import RecipeMixer
from recollect.costs import Workload, recipe_cost
from recollect.experiments.comparison.compare import (
    ModelSpec,
    as_list,
    build_configs,
    resolve_model,
    resolve_sizes,
)
from recollect.experiments.comparison.results import (
    ModelRun,
    NoProgress,
    ProgressReporter,
    Sizes,
)
from recollect.experiments.comparison.tasks import RECALL_TASKS, check_text_used, read_corpus
from recollect.experiments.comparison.training import Job, JobRunner, training_environment
from recollect.experiments.recipe_search.halving import (
    Trial,
    next_promotion,
    rung_steps,
)
from recollect.experiments.recipe_search.report import RESULTS_NAME, to_json
from recollect.experiments.recipe_search.result import Search
from recollect.experiments.recipe_search.space import Candidate, draw_neighbour, is_toml
from recollect.fields import Range, float_check, int_check, validate
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import parameter_count
from recollect.messages import UnregisteredMemberError, argument_name
from recollect.report.devices import resolve_device
from recollect.report.files import MAX_FILE_BYTES, read_regular, write_atomic
from recollect.report.lock import folder_lock
from recollect.report.signals import defer_signals
from recollect.serialization import plain, read_json
from recollect.tasks.text import TextCorpus, load_text
from recollect.zoo.preset import Preset

__all__ = ["load_search", "search"]


def search(
    start: ModelSpec = "linear_attention",
    tasks: Sequence[str] | str = "mqar",
    *,
    trials: int | None = None,
    seconds: float | None = None,
    folder: str | PathLike[str] | None = None,
    baselines: Sequence[ModelSpec] | str | Preset = (),
    sizes: Mapping[str, Sizes] | Sizes | None = None,
    rungs: int = 3,
    max_state: float = 4.0,
    max_time: float = 10.0,
    text: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    corpus: TextCorpus | None = None,
    seed: int = 0,
    engine: str = "auto",
    device: str | None = None,
    progress: ProgressReporter | None = None,
) -> Search:
    """Search recipes near a start: draw them, train them briefly, and train the best ones longer.

    A drawn recipe has one or two other choices than the start. Their members are all that are
    registered, so members of yours take part. All models of a task have the number of parameters of
    the largest of the start and the baselines. A recipe is first trained for a ninth of the steps
    of its task. The best third is trained for a third of the steps, and the best third of these
    for all steps (successive halving). The best recipe has the best mean rank in the tasks. Take
    fewer ``rungs`` if models learn nothing within a ninth of the steps.

    Args:
        start: zoo name, preset, ``(name, recipe)`` or ``(name, recipe, options)`` of one recipe.
        tasks: ``"text"``, ``"mqar"`` or ``"capacity"``; one task or a list.
        trials: number of drawn recipes. Either ``trials`` or ``seconds`` is given.
        seconds: wall time, in place of ``trials``; a trial that has begun is finished. A continued
            search counts the time of its earlier trials.
        folder: receives ``results.json`` after every trial. A search with equal settings is
            continued from the folder, with the result of one that was not interrupted.
        baselines: models to measure with all steps for comparison, in the form of ``start``.
        sizes: sizes by task, or those of the only task, as in `compare`.
        rungs: number of lengths of training. Each one has three times the steps of the one before.
        max_state, max_time: largest state and largest estimated time of a drawn recipe, as
            multiples of those of the start, see `recollect.cost`.
        text, corpus, seed, engine, device, progress: as in `compare`.

    Returns:
        The search. After a keyboard interrupt it contains the trials up to then.

    Raises:
        ValueError: a composition, an unknown task, both or none of ``trials`` and ``seconds``, an
            argument out of range, or a folder with another search.
        RecipeError: an unknown zoo name.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=48,
        ...     schedule=rc.experiments.Schedule(steps=2, batch=1),
        ... )
        >>> search = rc.experiments.search(
        ...     "linear_attention", "mqar", trials=2, sizes=sizes, folder="runs/search"
        ... )
        >>> len(search.candidates), rc.experiments.load_search("runs/search").best == search.best
        (3, True)
    """
    size_by_task = resolve_sizes(sizes, as_list("tasks", tasks, caller="search"), caller="search")
    budget = _Budget.checked(trials, seconds)
    positive = float_check(Range(low=0.0, low_open=True))
    for name, limit in {"max_state": max_state, "max_time": max_time}.items():
        validate(argument_name(name, f"search: {name}"), positive, limit)
    validate(argument_name("rungs", "search: rungs"), int_check(1, 10), rungs)
    validate(argument_name("seed", "search: seed"), int_check(0, 2**32 - 1), seed)
    target_device = resolve_device(device, argument_name=argument_name("device", "search: device"))
    check_text_used([*size_by_task], text=text, corpus=corpus)
    models = [_one_recipe(x) for x in (start, *as_list("baselines", baselines, caller="search"))]
    names = [name for name, _ in models]
    if len(set(names)) < len(names):
        raise ValueError(f"search: a model is named twice in {', '.join(names)}")
    if "text" in size_by_task:
        corpus = corpus or (load_text() if text is None else read_corpus(text))
    space = _Space(
        sizes=size_by_task,
        models=models,
        engine=engine,
        seed=seed,
        limits=(max_state, max_time),
        corpus=corpus,
    )
    result = Search(
        settings={
            "start": names[0],
            "layers": {name: mixer.to_dict() for name, mixer in models},
            "sizes": {task: asdict(size) for task, size in size_by_task.items()},
            "seed": seed,
            "engine": engine,
            "rungs": rungs,
            "max_state": float(max_state),
            "max_time": float(max_time),
            "sha256": "" if corpus is None else corpus.sha256,
        },
        candidates=tuple(
            Candidate(
                name=name,
                mixer=mixer,
                relative_time=space.cost(mixer)[1],
                is_baseline=index > 0,
            )
            for index, (name, mixer) in enumerate(models)
        ),
        trials=(),
        environment=training_environment(1, 1, target_device),
    )
    trainer = _Trainer(
        space, JobRunner(corpus), rungs, str(target_device), progress or NoProgress()
    )
    if folder is None:
        return _run(result, space, trainer, budget, None)
    path = Path(folder) / RESULTS_NAME
    with folder_lock(path.parent):
        return _run(_continued(path, result), space, trainer, budget, path)


def load_search(folder: str | PathLike[str]) -> Search:
    """Return the search that is stored in a folder.

    Args:
        folder: folder of the search, or its ``results.json``. Only data is read.

    Raises:
        ValueError: the file is no search, or one of another version.
        OSError: there is no regular file.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=48,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1),
        ... )
        >>> search = rc.experiments.search("gla", "mqar", trials=1, sizes=sizes)
        >>> paths = search.save("runs/gla")
        >>> rc.experiments.load_search("runs/gla").to_dict() == search.to_dict()
        True
    """
    path = Path(folder)
    path = path / RESULTS_NAME if path.is_dir() else path
    try:
        return Search.from_dict(read_json(read_regular(path, limit=MAX_FILE_BYTES)))
    except UnregisteredMemberError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is no search that this version reads ({type(error).__name__}: {error}): "
            "choose another folder"
        ) from None


@dataclass(frozen=True, kw_only=True)
class _Budget:
    trials: int | None
    seconds: float | None

    @classmethod
    def checked(cls, trials: int | None, seconds: float | None) -> _Budget:
        names = argument_name("trials"), argument_name("seconds")
        if (trials is None) == (seconds is None):
            raise ValueError(f"search: the budget is either {names[0]} or {names[1]}: give one")
        if trials is not None:
            validate(argument_name("trials", "search: trials"), int_check(1), trials)
        else:
            positive = float_check(Range(low=0.0, low_open=True))
            validate(argument_name("seconds", "search: seconds"), positive, seconds)
        return cls(trials=trials, seconds=seconds)

    def allows_drawing(self, search: Search) -> bool:
        """Whether another recipe may be drawn."""
        return self.trials is None or sum(x.draws > 0 for x in search.candidates) < self.trials

    def is_spent(self, search: Search) -> bool:
        """Whether the time is over."""
        return self.seconds is not None and sum(x.seconds for x in search.trials) >= self.seconds


def _one_recipe(model: ModelSpec) -> tuple[str, RecipeMixer]:
    """Return the name of a model and its only recipe."""
    name, mixers = resolve_model(model)
    mixer = next(iter(mixers.values()))
    if len(mixers) > 1 or not isinstance(mixer, RecipeMixer):
        raise ValueError(f"search: {name} is a composition; give a model of one recipe")
    if not is_toml(mixer.recipe):
        raise ValueError(f"search: {name} has a field without a value, which TOML cannot express")
    return name, mixer


@dataclass(frozen=True, kw_only=True)
class _Space:
    """Models of equal size, and the limits of drawn recipes."""

    sizes: Mapping[str, Sizes]  # sizes by task
    models: Sequence[tuple[str, RecipeMixer]]  # name and recipe of the start and of each baseline
    engine: str  # as in `search`
    seed: int  # as in `search`
    # largest multiples of the state and the estimated time of the start
    limits: tuple[float, float]
    corpus: TextCorpus | None  # as in `search`

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Number of parameters of every model by task: that of the largest given model."""
        return {
            task: max(
                parameter_count(self.config(task, *model, parameters=None)) for model in self.models
            )
            for task in self.sizes
        }

    def config(
        self, task: str, name: str, mixer: RecipeMixer, parameters: int | None
    ) -> RecollectConfig:
        """Return the model of a recipe for a task."""
        is_recall = task in RECALL_TASKS
        data = RECALL_TASKS[task] if is_recall else self.corpus
        assert data is not None
        (config,) = build_configs(
            [(name, {name: mixer})],
            data.vocab,
            self.sizes[task],
            self.engine,
            parameters,
            conv=is_recall,
        )
        return config

    def cost(self, mixer: RecipeMixer) -> tuple[int, float]:
        """Return bytes of state and estimated time of a recipe, of the largest task."""
        costs: list[tuple[int, float]] = []
        for size in self.sizes.values():
            channels = size.head_dim or size.width // size.heads
            workload = Workload(
                K=mixer.options.key_dim or size.key_dim or channels,
                V=channels,
                H=size.heads,
                T=size.length,
                B=size.schedule.batch,
            )
            price = recipe_cost(mixer.recipe, workload)
            costs.append((price.state_bytes, price.relative_time))
        return max(x for x, _ in costs), max(x for _, x in costs)

    def accepts(self, mixer: RecipeMixer) -> bool:
        """Whether a recipe is within the limits, and has models of equal size."""
        try:
            limits = zip(self.cost(mixer), self.cost(self.models[0][1]), self.limits, strict=True)
            if any(x > factor * start for x, start, factor in limits):
                return False
            for task in self.sizes:
                self.config(task, "drawn", mixer, self.parameters[task])
        except ValueError:
            return False
        return True

    def draw(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return a recipe that is not among the candidates, or ``None`` if there is none."""
        neighbour = draw_neighbour(
            candidates[0].mixer,
            seed=self.seed,
            draws=max(x.draws for x in candidates),
            known={x.mixer.recipe.canonical() for x in candidates},
            accept=self.accepts,
        )
        if neighbour is None:
            return None
        (draws, mixer), names = neighbour, {x.name for x in candidates}
        name = next(x for x in map("recipe-{}".format, itertools.count(1)) if x not in names)
        return Candidate(name=name, mixer=mixer, relative_time=self.cost(mixer)[1], draws=draws)


@dataclass(frozen=True)
class _Trainer:
    """Trains a recipe on every task, by the runner of `compare`."""

    space: _Space
    runner: JobRunner
    num_rungs: int
    device: str
    progress: ProgressReporter

    def train(self, candidate: Candidate, rung: int) -> Trial:
        """Return the trial of a recipe; an interrupt raises `KeyboardInterrupt`."""
        started, runs = time.perf_counter(), list[ModelRun]()
        failure = ""
        for task, size in self.space.sizes.items():
            config = self.space.config(
                task, candidate.name, candidate.mixer, self.space.parameters[task]
            )
            steps = rung_steps(size.schedule.steps, rung, self.num_rungs)
            schedule = replace(size.schedule, steps=steps, evaluations=1)
            job = Job(
                task=task,
                model=candidate.name,
                config=config,
                size=replace(size, schedule=schedule),
                seed=self.space.seed,
                device=self.device,
            )
            outcome = self.runner.run(job, self.progress)
            if isinstance(outcome, str):
                failure = f"{task}: {outcome}"
                self.progress.on_failure(task, candidate.name, outcome)
                break
            if not outcome.finished:
                raise KeyboardInterrupt
            self.progress.on_end(outcome)
            runs.append(replace(outcome, options={}))
        return Trial(
            candidate=candidate.name,
            rung=rung,
            runs=tuple(runs),
            failure=failure,
            seconds=time.perf_counter() - started,
        )


def _run(
    search: Search, space: _Space, trainer: _Trainer, budget: _Budget, path: Path | None
) -> Search:
    """Train one recipe after another until the budget is spent."""
    try:
        while not budget.is_spent(search):
            step = _next_step(search, space, budget)
            if step is None:
                break
            candidate, rung = step
            trial = trainer.train(candidate, rung)
            known = search.candidates
            search = replace(
                search,
                candidates=known if candidate in known else (*known, candidate),
                trials=(*search.trials, trial),
            )
            if path is not None:
                with defer_signals():
                    write_atomic(path, to_json(search))
    except KeyboardInterrupt:
        search = replace(search, interrupted=True)
    return search


def _next_step(search: Search, space: _Space, budget: _Budget) -> tuple[Candidate, int] | None:
    """Return the recipe to train and its rung, or ``None`` if the search is finished."""
    measured = {trial.candidate for trial in search.trials}
    fixed = [x for x in search.candidates if x.draws == 0]
    for candidate in fixed:
        if candidate.name not in measured:
            return candidate, search.num_rungs - 1
    names = {x.name for x in fixed}
    trials = [trial for trial in search.trials if trial.candidate not in names]
    promotion = next_promotion(trials, search.tasks, search.num_rungs)
    if promotion is not None:
        return search.candidate(promotion[0]), promotion[1]
    neighbour = space.draw(search.candidates) if budget.allows_drawing(search) else None
    return None if neighbour is None else (neighbour, 0)


def _continued(path: Path, fresh: Search) -> Search:
    """Return the search of a file with the present environment, or a fresh one without a file."""
    if not path.exists():
        return fresh
    stored = load_search(path)
    settings = json.loads(json.dumps(plain(fresh.settings)))
    differing = [name for name in settings if stored.settings.get(name) != settings[name]]
    if differing:
        raise ValueError(
            f"search: {path} has another {' and '.join(differing)}: choose another folder, or "
            "delete the file to search again"
        )
    return replace(stored, environment=fresh.environment, interrupted=False)
