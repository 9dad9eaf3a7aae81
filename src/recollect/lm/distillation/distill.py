"""`distill`: replace attention of a trained decoder, and recover the loss of the replacement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recollect.lm.data.rows import collate, pad_documents
from recollect.lm.data.sources import BadLinePolicy
from recollect.lm.distillation.calibrate import AttentionStatistics, attention_statistics, calibrate
from recollect.lm.distillation.measure import continuations, generation_agreement, heldout_loss
from recollect.lm.distillation.plan import STAGES, Distilled, DistillPlan, DistillStage
from recollect.lm.distillation.trainers import LayerMatchingTrainer, LogitMatchingTrainer
from recollect.lm.loading import load_saved_model, load_saved_tokenizer
from recollect.lm.model.checkpoint import check_json
from recollect.lm.model.config import resolve_recipe
from recollect.lm.replacement.swap import (
    find_attention_modules,
    replace_attention,
    replace_layers,
    select_layers,
)
from recollect.lm.training.arguments import resolve_device, suppress_library_logs
from recollect.lm.training.atomic_checkpoints import STAGING_DIR, commit_folder, remove_staging
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import SilentObserver, TrainObserver
from recollect.lm.training.setup import load_text_data
from recollect.lm.training.train import run_folder, train
from recollect.lm.training.trainer import RecollectTrainer
from recollect.report.files import write_atomic
from recollect.report.ranks import world_size

__all__ = ["distill"]

RECORD = "distill.json"
"""File of the folder with the plan and the results so far."""

CALIBRATION_ROWS = 32


def distill(
    plan: DistillPlan, *, resume: bool = False, observer: TrainObserver | None = None
) -> Distilled:
    """Replace attention of a decoder by a recipe, and train until the lost loss is recovered.

    The steps are, in order:

    1. *swap*: `replace_attention` copies the projections.
    2. *calibrate*: decays, writes and output gates get initial values from the attention weights
       and outputs of the teacher (after Taylor-Calibrate, arXiv 2606.16429).
    3. *match_layers*: each new layer is trained to the output of the attention that it replaces,
       from the teacher's input of that layer. All other weights are frozen.
    4. *match_logits*: all weights are trained to the distributions of the teacher.
    5. *fine_tune*: all weights are trained on the text.

    Steps 3 to 5 are runs of `train`, each in a folder of its own. Two measurements on held-out rows
    follow every step: the loss, and the share of greedy continuations that equals the teacher's.

    Args:
        plan: The plan.
        resume: Whether to continue a distillation that was stopped. It ends with the weights of one
            that was not.
        observer: Receives a message after each step, and the progress of the runs.

    Returns:
        The model, and loss and continuations before and after each step.

    Raises:
        ValueError: The teacher has no attention that can be replaced, the folder contains another
            distillation or none to resume, another process uses the folder, or the plan is invalid.
        RecipeError: The recipe does not fit the decoder's sizes.
        TrainingInterrupted: As in `train`.

    Examples:
        >>> from pathlib import Path
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, bos_token_id=None, eos_token_id=256,
        ... )
        >>> LlamaForCausalLM(config).save_pretrained("llama")
        >>> _ = Path("text.txt").write_text("a memory is a map from keys to values. " * 40)
        >>> plan = rc.lm.DistillPlan(
        ...     teacher="llama", recipe="gated_delta_net", out="swapped",
        ...     data={"train": "text.txt", "context": 32},
        ...     steps={"match_layers": 2, "match_logits": 1, "fine_tune": 1},
        ... )
        >>> result = rc.lm.distill(plan)
        >>> [stage.name for stage in result.stages]
        ['swap', 'calibrate', 'match_layers', 'match_logits', 'fine_tune']
    """
    if not isinstance(plan, DistillPlan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"distill takes a DistillPlan, not {type(plan).__name__}")
    if world_size() > 1:
        raise ValueError(
            "distill runs in one process, and a launcher started several: start it without the "
            "launcher"
        )
    with suppress_library_logs():
        distillation = _Distillation(plan, observer or SilentObserver())
        with run_folder(distillation.out, lock=True):
            return distillation.run(resume=resume)


class _Distillation:
    """A distillation with its teacher, its held-out rows and its results so far."""

    def __init__(self, plan: DistillPlan, observer: TrainObserver) -> None:
        self.plan, self.observer = plan, observer
        self.out, self.start = Path(plan.out), Path(plan.out) / "swapped"
        if self.out.resolve() == Path(plan.teacher).resolve():
            raise ValueError(f"{self.out} contains the original model: name another folder as out")
        self.recipe, self.options = resolve_recipe(plan.recipe)
        self.train_plan = TrainPlan.from_dict(plan.train_tables(STAGES[0], start=self.start))
        self.device = resolve_device(self.train_plan, 1)
        self.record: dict[str, Any] = {"plan": plan.to_dict(), "stages": []}

    def run(self, *, resume: bool) -> Distilled:
        self._open_record(resume=resume)
        self._load_teacher()
        last_of_swap = "calibrate" if self.plan.calibrate else "swap"
        if all(stage.name != last_of_swap for stage in self.stages):
            self._swap()
        folder = self.start
        for name in STAGES:
            steps = self.plan.num_steps[name]
            if not steps:
                continue
            if all(stage.name != name for stage in self.stages):
                self._train(name, folder)
                self._add_stage(name, steps, self._load(self.out / name / "model"))
            folder = self.out / name / "model"
        self._save_model(folder)
        return Distilled(
            model=self._load(self.out / "model"),
            folder=self.out / "model",
            layers=tuple(self.record["layers"]),
            damage={int(index): x for index, x in self.record["damage"].items()},
            stages=self.stages,
        )

    # -- records -----------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[DistillStage, ...]:
        """The finished steps."""
        lists = ("loss", "agreement")
        return tuple(
            DistillStage(**{**stage, **{name: tuple(stage[name]) for name in lists}})
            for stage in self.record["stages"]
        )

    def _open_record(self, *, resume: bool) -> None:
        path = self.out / RECORD
        if not path.exists():
            if resume:
                raise ValueError(
                    f"{self.out} contains no distillation to resume: leave out --resume to start "
                    "one there"
                )
            return
        saved = check_json(path)
        if not resume:
            raise ValueError(
                f"{self.out} already contains a distillation: use --resume to continue it, or name "
                "another folder"
            )
        for key, value in self.record["plan"].items():
            if saved["plan"].get(key) != value:
                raise ValueError(
                    f"{self.out} was started with another value of {key}: resume it with the plan "
                    "of its start, or name another folder"
                )
        self.record = saved

    def _add_stage(self, name: str, steps: int, model: Any) -> None:
        """Measure a model after a step, and record the step."""
        loss, agreement = self.record["teacher"]
        if self.record["stages"]:
            previous = self.record["stages"][-1]
            loss, agreement = previous["loss"][1], previous["agreement"][1]
        stage = DistillStage(
            name=name,
            steps=steps,
            loss=(loss, heldout_loss(model, self.heldout)),
            agreement=(agreement, generation_agreement(model, self.references)),
        )
        self.record["stages"].append(asdict(stage))
        write_atomic(self.out / RECORD, json.dumps(self.record, indent=2) + "\n")
        self.observer.on_message(str(stage))

    # -- models ------------------------------------------------------------------------------

    def _load(self, folder: Path | str) -> Any:
        return load_saved_model(str(folder), any_decoder=True).float().to(self.device)

    def _load_teacher(self) -> None:
        self.teacher = self._load(self.plan.teacher)
        self._check_keep_attention()
        self.tokenizer = load_saved_tokenizer(self.plan.teacher, self.teacher)
        data = load_text_data(self.train_plan, self.tokenizer, BadLinePolicy(skip=True))
        batch_size = self.train_plan.optimizer.batch
        rows = data.heldout
        batches = [
            self._collate(rows[first : first + batch_size])
            for first in range(0, len(rows), batch_size)
        ]
        self.heldout = [part for batch in batches for part in pad_documents(batch)]
        self.calibration_rows = list(islice(iter(data.train), CALIBRATION_ROWS))
        self.references = continuations(self.teacher, batches)
        self.record["teacher"] = heldout_loss(self.teacher, self.heldout), 1.0

    def _check_keep_attention(self) -> None:
        """Check that at least one layer is replaced."""
        modules = find_attention_modules(self.teacher)
        depth = self.teacher.config.get_text_config(decoder=True).num_hidden_layers
        keep = self.plan.keep_attention
        if keep and modules:
            count = len(select_layers(modules, self.plan.layers, depth))
            if keep >= count:
                raise ValueError(
                    f"keep_attention = {keep} keeps all of {count} layers: choose fewer"
                )

    def _collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        return collate(rows, reset_memory=self.train_plan.data.packing == "documents")

    def _swap(self) -> None:
        """Replace attention, initialize gates, and save the model."""
        statistics = {}
        if self.plan.calibrate:
            batches = [
                {name: x.to(self.device) for name, x in batch.items()}
                for batch in pad_documents(self._collate(self.calibration_rows))
            ]
            statistics = attention_statistics(self.teacher, *batches)
        self.record |= {"stages": [], "damage": {}}
        layers = self.plan.layers
        if self.plan.keep_attention:
            layers = self._rank(layers, statistics)
        torch.manual_seed(self.train_plan.run.seed)
        student = self._load(self.plan.teacher)
        report = replace_attention(student, self.plan.recipe, layers)
        self.record["layers"] = [layer.index for layer in report.layers]
        if self.plan.calibrate:
            self._add_stage("swap", 0, student)
        for layer in report.layers:
            module = student.get_submodule(layer.name)
            if layer.index in statistics:
                calibrate(module.layer, statistics[layer.index], copied="o" in layer.copied)
        student.save_pretrained(self.start)
        self.tokenizer.save_pretrained(self.start)
        self._add_stage("calibrate" if self.plan.calibrate else "swap", 0, student)

    def _rank(
        self, layers: Sequence[int] | None, statistics: Mapping[int, AttentionStatistics]
    ) -> list[int]:
        """Return the layers to replace, without those whose replacement costs most."""
        model = self._load(self.plan.teacher)
        report = replace_layers(model, self.recipe, self.options, layers, engine="auto")
        teacher_loss, _ = self.record["teacher"]
        damage: dict[int, float] = {}
        for layer in report.layers:
            new: Any = model.get_submodule(layer.name)
            if layer.index in statistics:
                calibrate(new.layer, statistics[layer.index], copied="o" in layer.copied)
            old = self.teacher.get_submodule(layer.name)
            self.teacher.set_submodule(layer.name, new)
            damage[layer.index] = heldout_loss(self.teacher, self.heldout) - teacher_loss
            self.teacher.set_submodule(layer.name, old)
            self.observer.on_message(f"layer {layer.index} alone: loss + {damage[layer.index]:.3f}")
        self.record["damage"] = damage
        ranked = sorted(damage, key=lambda index: damage[index])
        return sorted(ranked[: len(ranked) - self.plan.keep_attention])

    def _train(self, name: str, start: Path) -> None:
        """Train a step, or continue it."""
        folder = self.out / name
        if (folder / "model").exists():  # finished, and not yet recorded
            return
        trainers: dict[str, Callable[..., RecollectTrainer]] = {
            "match_layers": partial(LayerMatchingTrainer, teacher=self.teacher),
            "match_logits": partial(LogitMatchingTrainer, teacher=self.teacher),
            "fine_tune": RecollectTrainer,
        }
        train(
            TrainPlan.from_dict(self.plan.train_tables(name, start=start)),
            resume=(folder / "plan.json").exists(),
            observer=self.observer,
            trainer_class=trainers[name],
        )

    def _save_model(self, folder: Path) -> None:
        """Copy the model of the last step to ``out/model``, atomically."""
        staged = self.out / STAGING_DIR / "model"
        remove_staging(self.out)
        shutil.copytree(folder, staged)
        commit_folder(staged, self.out / "model")
        remove_staging(self.out)
