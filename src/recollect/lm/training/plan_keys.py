"""Parsers of a plan's values, and hints for unknown keys and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recollect.choices.matmul_precision import PRECISIONS, precision_error
from recollect.fields import Range, float_check
from recollect.messages import short_repr, suggestion

__all__ = [
    "hint",
    "parse_betas",
    "parse_name",
    "parse_names",
    "parse_parallel",
    "parse_precision",
    "parse_recipe",
    "parse_table",
    "parse_text",
]


def _type_check(expected: str, *types: type) -> Callable[[Any], Any]:
    """Return a check for values of some types, which also copies mappings."""

    def check(value: Any) -> Any:
        if not isinstance(value, types):
            raise ValueError(f"must be {expected}, not {short_repr(value)}")
        return dict(value) if isinstance(value, Mapping) else value

    return check


parse_text = _type_check("a string", str)
parse_table = _type_check("a table", Mapping)
parse_recipe = _type_check("a string or a table", str, Mapping)
_parse_list = _type_check("a list of strings", list, tuple)
_parse_betas = _type_check("two numbers in [0, 1)", list, tuple)


def parse_name(value: Any) -> str:
    """Return a string of one line that is not blank."""
    if not parse_text(value).isprintable():
        raise ValueError(f"must be a string without control characters, not {short_repr(value)}")
    if not value.strip():
        raise ValueError(f"must be a name, not {value!r}")
    return value


def parse_names(value: Any) -> tuple[str, ...]:
    """Return a tuple of names; a string is a tuple of one."""
    names = _parse_list((value,) if isinstance(value, str) else value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"must be a list of strings, not {short_repr(value)}")
    return tuple(map(parse_name, names))


def parse_betas(value: Any) -> tuple[float, float]:
    """Return the two coefficients of AdamW."""
    if len(_parse_betas(value)) != 2:
        raise ValueError(f"must be two numbers in [0, 1), not {short_repr(value)}")
    beta = float_check(Range.of(at_least=0, below=1))
    return beta(value[0]), beta(value[1])


def parse_parallel(value: Any) -> str | dict[str, int]:
    """Return ``"ddp"``, ``"fsdp"``, or the sizes of a mesh by name."""
    if isinstance(value, str):
        if value not in ("ddp", "fsdp"):
            raise ValueError(
                f"must be 'ddp', 'fsdp' or a mesh as {{data = 4, tensor = 2}}, not {value!r}"
            )
        return value
    sizes: dict[str, int] = parse_table(value)
    for name, size in sizes.items():
        if name not in ("data", "tensor", "context"):
            raise ValueError(f"has the sizes data, tensor and context, and no {short_repr(name)}")
        if type(size) is not int or size < 1:
            raise ValueError(f"needs whole numbers >= 1, and {name} is {short_repr(size)}")
    return sizes


def parse_precision(value: Any) -> str | dict[str, str]:
    """Return a precision of matrix products, or precisions by the name of the recipe."""
    for precision in value.values() if isinstance(value, Mapping) else [value]:
        if precision not in PRECISIONS:
            expected = "'float32' or 'tf32', or a table of these by recipe"
            raise ValueError(precision_error(precision, expected))
    return dict(value) if isinstance(value, Mapping) else str(value)


_KEY_ALIASES = {
    "lr": "learning_rate peak_lr max_lr",
    "steps": "max_steps num_steps iterations",
    "batch": "batch_size micro_batch_size per_device_train_batch_size",
    "accumulate": "gradient_accumulation_steps grad_accum",
    "clip": "max_grad_norm grad_clip clip_grad",
    "warmup": "warmup_ratio warmup_steps",
    "width": "hidden_size d_model dim",
    "depth": "num_layers num_hidden_layers n_layers",
    "heads": "num_heads num_attention_heads n_heads",
    "mlp": "intermediate_size ffn_dim",
    "context": "seq_len sequence_length max_length block_size",
    "vocab": "vocab_size",
    "out": "output_dir out_dir",
    "save_every": "save_steps",
    "eval_every": "eval_steps",
    "log_every": "logging_steps",
    "checkpointing": "gradient_checkpointing",
    "parallel": "strategy fsdp mesh distributed",
}
"""Names of a plan's keys in other libraries."""


def hint(name: str, known: Mapping[str, list[str]], table: str | None = None) -> str:
    """Return advice for an unknown key of a table, or for an unknown table."""
    key = next((key for key, aliases in _KEY_ALIASES.items() if name in aliases.split()), name)
    if table is not None and key in known[table]:
        return f"did you mean {key!r}?"
    owner = next((owner for owner, keys in known.items() if key in keys), None)
    if owner is not None:
        return f"{key} is a key of [{owner}]"
    return suggestion(name, list(known) if table is None else known[table])
