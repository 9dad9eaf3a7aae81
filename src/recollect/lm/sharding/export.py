"""A checkpoint as a saved model: shards put together on one process."""

from __future__ import annotations

from pathlib import Path

from recollect.lm.data.tokenizers import load_tokenizer
from recollect.lm.model.checkpoint import CheckpointError
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.manifest import write_manifest
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.sharding.checkpoints import SHARDS, load_weights
from recollect.lm.sharding.heads import model_cuts
from recollect.lm.training.arguments import quiet
from recollect.lm.training.atomic_checkpoints import (
    check_resumable,
    clear_aside,
    explained,
    last_checkpoint,
    place_folder,
)

__all__ = ["export_model"]


def export_model(checkpoint: Path, out: Path) -> Path:
    """Write the model of a checkpoint as `save_pretrained` does, however it was shared.

    Args:
        checkpoint: a folder ``checkpoint-N``, or that of a run, whose newest is taken.
        out: the folder of the model; it appears whole, and must not be there.

    Returns:
        The checkpoint.

    Raises:
        ValueError: no checkpoint, or a folder that is there already.
        CheckpointError: a file of it that is gone, cut short or altered; a full disk.
    """
    if not (checkpoint / "trainer_state.json").exists():
        newest = last_checkpoint(checkpoint)
        if newest is None:
            raise ValueError(f"{checkpoint} is no checkpoint of a run, and holds none")
        checkpoint = newest
    if out.exists():
        raise ValueError(f"{out} is there already: name a new folder")
    check_resumable(checkpoint)
    model = RecollectForCausalLM(RecollectConfig.from_pretrained(checkpoint))
    if not (checkpoint / SHARDS).is_dir() and not any(checkpoint.glob("model*.safetensors")):
        raise CheckpointError(f"{checkpoint} holds no weights")
    load_weights(checkpoint, model, model_cuts(model), tensor=1)
    aside = out.parent / ".saving" / out.name
    with explained(out.parent, out.name):
        with quiet():
            model.save_pretrained(aside)
        load_tokenizer(str(checkpoint)).save_pretrained(str(aside))
        write_manifest(aside)
        place_folder(aside, out)
    clear_aside(out.parent)
    return checkpoint
