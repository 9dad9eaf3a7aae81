"""`recollect export`: a sharded checkpoint as a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="Folder of a run, or its folder checkpoint-N."),
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the model.")],
) -> None:
    """Merge the shards of a checkpoint into safetensors, with tokenizer and configuration."""
    if not checkpoint.is_dir():
        raise ValueError(f"there is no folder {checkpoint}: name that of a run or a checkpoint")
    from recollect.lm.training.export import export_model

    source = export_model(checkpoint, out)
    typer.echo(f"model: {out}, the weights of {source}")
