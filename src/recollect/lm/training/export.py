"""Export of a checkpoint as a saved model, by one process."""

from __future__ import annotations

from pathlib import Path

from recollect.lm.data.tokenizers import load_tokenizer
from recollect.lm.distributed.checkpoints import SHARDS_DIR, load_weights
from recollect.lm.distributed.head_sharding import model_shard_specs
from recollect.lm.model.checkpoint import CheckpointError
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.manifest import write_manifest
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.arguments import suppress_library_logs
from recollect.lm.training.atomic_checkpoints import (
    STAGING_DIR,
    check_resumable,
    commit_folder,
    last_checkpoint,
    remove_staging,
    translate_write_errors,
)

__all__ = ["export_model"]


def export_model(checkpoint: Path, out: Path) -> Path:
    """Save the model of a checkpoint, or of a run's last checkpoint. Return the checkpoint.

    Raise ValueError without a checkpoint or if ``out`` exists, and CheckpointError for a missing or
    altered file or a full disk.
    """
    if not (checkpoint / "trainer_state.json").exists():
        last = last_checkpoint(checkpoint)
        if last is None:
            raise ValueError(f"{checkpoint} is not a checkpoint of a run and contains none")
        checkpoint = last
    if out.exists():
        raise ValueError(f"{out} exists: name a new folder")
    check_resumable(checkpoint)
    model = RecollectForCausalLM(RecollectConfig.from_pretrained(checkpoint))
    if not (checkpoint / SHARDS_DIR).is_dir() and not any(checkpoint.glob("model*.safetensors")):
        raise CheckpointError(f"{checkpoint} contains no weights")
    load_weights(checkpoint, model, model_shard_specs(model), tp_size=1)
    staged = out.parent / STAGING_DIR / out.name
    with translate_write_errors(out.parent, out.name):
        with suppress_library_logs():
            model.save_pretrained(staged)
        load_tokenizer(str(checkpoint)).save_pretrained(str(staged))
        write_manifest(staged)
        commit_folder(staged, out)
    remove_staging(out.parent)
    return checkpoint
