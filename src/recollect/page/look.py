"""A page that shows the memories of a model at work on a text, as one HTML file.

For each layer, head and token it has the measurements of `recollect.diagnose`, and the answers of
the memory for the key of a token, as `recollect.trace` reads them. It needs no other host.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.layers import memory_layers
from recollect.explanation.diagnose import diagnose
from recollect.explanation.diagnosis import Diagnosis, curves_to_json
from recollect.explanation.model_inputs import (
    MemoryRun,
    model_inputs,
    received_by_memory,
    received_tokens,
)
from recollect.explanation.trace import read_back
from recollect.messages import RecipeError
from recollect.page.write import fill_placeholders, read_static
from recollect.report.files import write_atomic

__all__ = ["MAX_BYTES", "MAX_TOKENS", "look", "render_look"]

MAX_TOKENS = 256
"""Tokens of a page; each memory is read at T keys after each of T tokens."""

MAX_BYTES = 2_000_000
"""Largest size of a page."""

DIGITS = 5
"""Significant digits of a measurement."""


def look(
    model: nn.Module,
    ids: Tensor | Sequence[int],
    path: str | PathLike[str],
    *,
    tokens: Sequence[str] | None = None,
    title: str = "",
) -> Path:
    """Write the page of a model and a text to a file, and return its path.

    Args:
        model: a model with memories, such as a `RecollectForCausalLM`, or a decoder with layers of
            `recollect.lm.replace_attention` or `recollect.lm.adopt`.
        ids: token ids ``[T]`` or ``[1, T]``.
        path: path of the HTML file; missing folders are created.
        tokens: T words; numbers by default.
        title: title of the page; the name of the model's class by default.

    Raises:
        ValueError: several sequences, too many tokens, or a page above 2 MB.
        RecipeError: the model has no memory that can be read token by token.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> from recollect.page import look
        >>> look(rc.lm.RecollectForCausalLM(config), [1, 2, 3], "memory.html").name
        'memory.html'
    """
    return write_atomic(path, render_look(model, ids, tokens=tokens, title=title))


@torch.no_grad()
def render_look(
    model: nn.Module,
    ids: Tensor | Sequence[int],
    *,
    tokens: Sequence[str] | None = None,
    title: str = "",
) -> str:
    """Return the page that `look` writes."""
    inputs = model_inputs(model, ids)
    if not inputs.numel():
        raise ValueError("the page shows a text of at least one token: give a longer text")
    if inputs.is_floating_point() or inputs.shape[0] != 1 or inputs.shape[1] > MAX_TOKENS:
        raise ValueError(
            f"the page shows one text of at most {MAX_TOKENS} token ids, not {[*inputs.shape]}: "
            "give a shorter text"
        )
    words = [str(t) for t in range(inputs.shape[1])] if tokens is None else [*tokens]
    if len(words) != inputs.shape[1]:
        raise ValueError(f"tokens must be {inputs.shape[1]} words, not {len(words)}")
    layers = memory_layers(model, "look")
    measured = diagnose(model, inputs).layers
    options = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    # `diagnose` has raised every error that is not about the values of a layer.
    with received_tokens(layers) as calls, suppress(ValueError):
        model(inputs, **options)
    layer_data = [
        _layer_data(name, measured[name], MemoryRun(layer, x))
        for name, layer, x in received_by_memory(layers, calls)
    ]
    if not layer_data:
        raise RecipeError(
            f"no memory of {type(model).__name__} can be read token by token: its compositions "
            "replace the values of their memories"
        )
    data = {"tokens": words, "layers": layer_data}
    return _fill(title or type(model).__name__, data)


def _layer_data(name: str, diagnosis: Diagnosis, run: MemoryRun) -> dict[str, Any]:
    """Return the measurements of a layer as data for the page."""
    curves = {
        "surprise": diagnosis.error,
        "effective step": diagnosis.step,
        "half-life of the decay, tokens": diagnosis.half_life,
    }
    maps = {
        **{f"norm of {name}": (norm, None) for name, norm in diagnosis.memory.items()},
        **{
            f"effective rank of {name}": (rank, diagnosis.max_rank[name])
            for name, rank in diagnosis.rank.items()
        },
    }
    cosine = read_back(run)[0] if diagnosis.first_fault is None else None
    return {
        "name": name,
        "recipe": diagnosis.recipe.memory.prediction_text("k_t"),
        "engine": diagnosis.engine,
        "heads": diagnosis.heads,
        "findings": list(diagnosis.findings),
        "positions": diagnosis.positions.tolist(),
        "curves": {key: _rounded(x) for key, x in curves.items() if x is not None},
        "maps": {
            key: {"values": _rounded(x), "capacity": capacity}
            for key, (x, capacity) in maps.items()
        },
        "answers": None if cosine is None else _answers(cosine),
    }


def _rounded(curve: Tensor) -> Any:
    """Return a curve as lists of numbers with `DIGITS` digits, with null for NaN and infinities."""

    def round_number(x: Any) -> Any:
        if isinstance(x, list):
            return [round_number(item) for item in x]
        return None if x is None else float(f"{x:.{DIGITS}g}")

    return round_number(curves_to_json(curve))


def _answers(cosine: Tensor) -> dict[str, Any]:
    """Return cosines ``[T, T·n, H]`` as one byte each, 127 times the cosine plus 128; 0 is NaN."""
    scaled = (127 * cosine.clamp(-1, 1)).round() + 128
    data = scaled.nan_to_num(0.0).to(torch.uint8).contiguous().cpu().numpy().tobytes()
    return {"keys": cosine.shape[1], "data": base64.b64encode(data).decode("ascii")}


def _fill(title: str, data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "/* style */": read_static("look.css"),
        "/* script */": read_static("look.js"),
        "<!-- title -->": html.escape(title),
        # Escaped, so that no text of the data can end its element.
        "/* data */": text.replace("<", "\\u003c"),
    }
    page = fill_placeholders(read_static("look.html"), parts)
    size = len(page.encode("utf-8"))
    if size > MAX_BYTES:
        raise ValueError(
            f"the page would have {size:,} bytes, and {MAX_BYTES:,} is the limit: give a shorter "
            "text"
        )
    return page
