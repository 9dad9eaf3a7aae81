"""`recollect export`: a checkpoint of a run as a model that anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recollect.cli.console import check_exists

__all__ = ["export"]


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder checkpoint-N, or that of a run.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model goes.")],
) -> None:
    """Put a checkpoint's shards together: weights as safetensors, with tokenizer and config."""
    check_exists(checkpoint)
    from recollect.lm.sharding.export import export_model

    found = export_model(checkpoint, out)
    typer.echo(f"model: {out}, the weights of {found}")
