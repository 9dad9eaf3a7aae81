"""Checks of masks, packed documents and split sequences, for recipes and engines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.testing.compare import (
    flatten_state,
    gradients,
    gradients_of,
    require,
    require_close,
    run_in_pieces,
    run_recall,
)
from recollect.testing.inputs import Inputs

__all__ = ["EXACT", "check_gradients_across_splits", "check_masks", "check_packing"]

EXACT = 1e-10
"""Bound of relative errors in float64 if the same operations are grouped in another way."""


def check_masks(
    recipe: Recipe, x: Inputs, engine: str, mask: Tensor, *, chunk_size: int | None = None
) -> None:
    """Each sequence with an attention mask equals its real tokens alone, and masked outputs are 0.

    Masked tokens are NaN.
    """

    def fill_with_nan(a: Tensor) -> Tensor:
        return torch.where(mask.view(*mask.shape, *(1,) * (a.dim() - 2)), a, torch.nan)

    run = f"of engine {engine} under an attention mask"
    masked = x.map_token_tensors(fill_with_nan)
    options = {"engine": engine, "chunk_size": chunk_size, "attention_mask": mask}
    y, state, slopes = gradients(recipe, masked, **options)
    is_finite = all(torch.isfinite(slope).all() for slope in slopes.values())
    require(is_finite, f"gradients {run} are NaN")
    require(not y[~mask].any(), f"masked outputs {run} are not 0")
    for row in range(mask.shape[0]):
        real = mask[row]
        tokens = x.select_row(row).map_token_tensors(lambda a, real=real: a[:, real])
        row_y, row_state = run_recall(recipe, tokens, engine=engine)
        require_close(y[row : row + 1, real], row_y, EXACT, f"outputs {run} are")
        _require_states_close(recipe, state.select(torch.tensor([row])), row_state, run)


def check_packing(recipe: Recipe, x: Inputs, boundaries: Sequence[int], engine: str) -> None:
    """Documents packed in one sequence equal each document alone, and can be continued.

    ``boundaries`` are the first tokens of the documents, and the number of tokens.
    """
    run, count = f"of documents packed at {[*boundaries]} by engine {engine}", len(boundaries) - 1
    packed = {"engine": engine, "cu_seqlens": torch.tensor(boundaries)}
    y, state = run_recall(recipe, x, **packed)
    y2, state2 = run_recall(recipe, x, state=state, **packed)
    require(state.rows == count, "a packed sequence does not give one state per document")
    for i, (start, stop) in enumerate(itertools.pairwise(boundaries)):
        document = x.slice_tokens(start, stop)
        document_y, document_state = run_recall(recipe, document, engine=engine)
        require_close(y[:, start:stop], document_y, EXACT, f"outputs {run} are")
        document_y, document_state = run_recall(
            recipe, document, engine=engine, state=document_state
        )
        require_close(y2[:, start:stop], document_y, EXACT, f"outputs {run} that continue are")
        _require_states_close(recipe, state2.select(torch.tensor([i])), document_state, run)
    if x.init is not None:
        # One initial memory per document, here the same one.
        memories = tuple(a.expand(count, *a.shape) for a in x.init)
        copies, _ = run_recall(recipe, x, initial_memory=memories, **packed)
        require(torch.equal(copies, y), "packed documents with a memory each give other outputs")


def _require_states_close(recipe: Recipe, state: State, expected: State, run: str) -> None:
    # States of unbounded size contain masked tokens, and padding of shorter documents.
    if recipe.buffer_size is not None and not recipe.uses_kernel_rows:
        tensors = flatten_state(state), flatten_state(expected)
        require_close(*tensors, EXACT, f"{{name}} of the state {run} is")


def check_gradients_across_splits(
    recipe: Recipe, x: Inputs, engine: str, cuts: Sequence[int], tolerance: float = EXACT
) -> bool:
    """Gradients flow through a state between two calls; return whether outputs have a gradient."""
    slopes: list[dict[str, Tensor]] = []
    for ends in ([], cuts):
        leaves = x.with_grad()
        y, _ = run_in_pieces(recipe, leaves, ends, [engine])
        slopes.append(gradients_of(y.square().sum(), leaves))
        if not y.requires_grad:
            return False
    subject = f"the gradient of {{name}} by engine {engine} across splits at {[*cuts]} is"
    require_close(slopes[1], slopes[0], tolerance, subject)
    return True
