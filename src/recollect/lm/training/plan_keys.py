"""What keys of a plan may hold, and what is said of keys that there are not."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from recollect.choices.matmul_precision import PRECISIONS, precision_error
from recollect.fields import Range, float_check
from recollect.messages import short_repr

__all__ = [
    "hint_of_key",
    "hint_of_table",
    "to_betas",
    "to_mapping",
    "to_name",
    "to_parallel",
    "to_precision",
    "to_recipe",
    "to_separator",
    "to_string",
    "to_strings",
]


def to_string(value: Any) -> str:
    """Text of one line."""
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {short_repr(value)}")
    if not value.isprintable():
        raise ValueError(f"must be a string without control characters, not {short_repr(value)}")
    return value


def to_name(value: Any) -> str:
    """Text of one line that is not empty."""
    if not to_string(value).strip():
        raise ValueError(f"must be a name, not {value!r}")
    return str(value)


def to_separator(value: Any) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {short_repr(value)}")
    return value


def to_strings(value: Any) -> tuple[str, ...]:
    """One stands for a list of one."""
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(x, str) for x in items):
        raise ValueError(f"must be a list of strings, not {short_repr(value)}")
    return tuple(to_name(item) for item in items)


def to_mapping(value: Any) -> dict[str, Any]:
    """A table."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a table, not {short_repr(value)}")
    return dict(value)


def to_recipe(value: Any) -> str | dict[str, Any]:
    """A name, a file or a table."""
    if not isinstance(value, str | Mapping):
        raise ValueError(f"must be a string or a table, not {short_repr(value)}")
    return value if isinstance(value, str) else dict(value)


def to_betas(value: Any) -> tuple[float, float]:
    """AdamW's two."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"must be two numbers in [0, 1), not {short_repr(value)}")
    beta = float_check(Range.of(at_least=0, below=1))
    return beta(value[0]), beta(value[1])


def to_parallel(value: Any) -> str | dict[str, int]:
    """``"ddp"``, ``"fsdp"``, or the sizes of a mesh by name."""
    if isinstance(value, str):
        if value not in ("ddp", "fsdp"):
            raise ValueError(
                f"must be 'ddp', 'fsdp' or a mesh as {{data = 4, tensor = 2}}, not {value!r}"
            )
        return value
    sizes = to_mapping(value)
    for name, size in sizes.items():
        if name not in ("data", "tensor", "context"):
            raise ValueError(f"has the sizes data, tensor and context, and no {short_repr(name)}")
        if type(size) is not int or size < 1:
            raise ValueError(f"needs whole numbers >= 1, and {name} is {short_repr(size)}")
    return sizes


def to_precision(value: Any) -> str | dict[str, str]:
    """A precision of products, or one by name of a recipe."""
    for one in value.values() if isinstance(value, Mapping) else [value]:
        if one not in PRECISIONS:
            expected = "'float32' or 'tf32', or a table of these by recipe"
            raise ValueError(precision_error(one, expected))
    return dict(value) if isinstance(value, Mapping) else str(value)


_ALSO_CALLED = {
    **dict.fromkeys(("learning_rate", "peak_lr", "max_lr"), "lr"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations"), "steps"),
    **dict.fromkeys(("batch_size", "micro_batch_size", "per_device_train_batch_size"), "batch"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), "clip"),
    **dict.fromkeys(("mup", "parameterization", "use_mup"), "parametrization"),
    **dict.fromkeys(("mup_base_width", "mup_base_dim", "base_hidden_size"), "base_width"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), "warmup"),
    **dict.fromkeys(("hidden_size", "d_model", "dim"), "width"),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "n_layers"), "depth"),
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_heads"), "heads"),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), "mlp"),
    **dict.fromkeys(("seq_len", "sequence_length", "max_length", "block_size"), "context"),
    "vocab_size": "vocab",
    **dict.fromkeys(("matmul_precision", "float32_matmul_precision"), "precision"),
    **dict.fromkeys(("tbptt", "num_segments", "context_segments"), "segments"),
    **dict.fromkeys(("output_dir", "out_dir"), "out"),
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "logging_steps": "log_every",
    "gradient_checkpointing": "checkpointing",
    "loss_chunk_size": "loss_chunk",
    **dict.fromkeys(("strategy", "fsdp", "mesh", "distributed"), "parallel"),
}
"""What other libraries call our keys."""


def hint_of_key(name: str, table: str, known: Mapping[str, list[str]]) -> str:
    """What to say after a key that a table has not: where it stands, or the nearest that there is.

    Args:
        name: the key, perhaps as another library calls it.
        table: in which it was given.
        known: the keys of every table.
    """
    meant = _ALSO_CALLED.get(name, name)
    return _elsewhere(meant, table, known) or _instead(meant, known[table])


def hint_of_table(name: str, known: Mapping[str, list[str]]) -> str:
    """What to say after a table that there is not.

    Args:
        name: the table, or a key that stands outside of its own.
        known: the keys of every table.
    """
    return _elsewhere(_ALSO_CALLED.get(name, name), "", known) or _instead(name, list(known))


def _elsewhere(meant: str, table: str, known: Mapping[str, list[str]]) -> str:
    """Where a key stands, if that is another table only."""
    if meant in known.get(table, ()):
        return ""
    places = [other for other, keys in known.items() if meant in keys]
    return f"; {meant} stands in [{places[0]}]" if places else ""


def _instead(name: str, known: list[str]) -> str:
    if name in known:
        near = [name]
    else:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    return f"; {hint} are {', '.join(known)}"
