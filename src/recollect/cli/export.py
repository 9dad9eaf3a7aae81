"""`recollect export`: a sharded checkpoint as a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recollect.cli.options import check_exists

__all__ = ["export"]


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="Folder of a run, or its folder checkpoint-N."),
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the model.")],
) -> None:
    """Merge the shards of a checkpoint into safetensors, with tokenizer and configuration."""
    check_exists(checkpoint)
    from recollect.lm.training.export import export_model

    source = export_model(checkpoint, out)
    typer.echo(f"model: {out}, the weights of {source}")
