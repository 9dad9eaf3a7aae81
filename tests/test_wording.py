"""An impossible size is refused under the user's name for it, in every check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect as rc
from recollect.messages import argument_name, renamed_arguments

ROPE = rc.LayerOptions(rope_theta=1e4)
PRESET = rc.zoo.get("delta_net")
FEED_FORWARD = rc.zoo.get("ffn_relu")


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the sentence is compared whole
        make()
    return str(refused.value)


def test_unknown_argument_suggests_the_nearest() -> None:
    with pytest.raises(
        TypeError, match=r"^MemoryLayer has no argument 'num_head'; did you mean 'num_heads'\?"
    ):
        rc.MemoryLayer(64, recipe="gla", num_head=4)  # type: ignore[call-arg]


def test_words_nest_and_end() -> None:
    with renamed_arguments({"hidden_size": "width", "head_dim": ""}):
        with renamed_arguments({"d_model": "hidden_size", "num_heads": "num_attention_heads"}):
            assert [argument_name("d_model"), argument_name("num_heads")] == [
                "width",
                "num_attention_heads",
            ]
            assert argument_name("head_dim") == ""
            assert argument_name("depth", "the depth") == "the depth"
        assert argument_name("d_model") == "d_model"

    @renamed_arguments({"num_heads": "H"})
    def refuse() -> None:
        raise ValueError(argument_name("num_heads"))

    for _ in range(2):
        assert refusal(refuse) == "H"
    assert argument_name("num_heads") == "num_heads"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: rc.MemoryLayer(12, 5, rc.Recipe()),
            "d_model = 12 is not a multiple of num_heads = 5: choose other sizes, or give head_dim",
        ),
        (
            lambda: PRESET.build(12, 5),
            "d_model = 12 is not a multiple of num_heads = 5: choose other sizes, or give head_dim",
        ),
        (
            lambda: FEED_FORWARD.build(12, 5, options=rc.zoo.get("ffn_multi_head").options),
            "d_model = 12 is not a multiple of num_heads = 5: choose other sizes",
        ),
        (
            lambda: PRESET.build(12, 0),
            "num_heads must be a whole number from 1 to 2147483647, not 0",
        ),
        (
            lambda: PRESET.build(12, 4, num_kv_heads=3),
            "num_heads = 4 must be a multiple of num_kv_heads = 3: several query heads share one "
            "memory, never the other way",
        ),
        (
            lambda: PRESET.build(6, 2, options=ROPE),
            "LayerOptions(rope_theta=...) rotates pairs of channels and needs an even d_model / "
            "num_heads, not 3",
        ),
        (
            lambda: PRESET.build(8, 2, options=ROPE, head_dim=5),
            "LayerOptions(rope_theta=...) rotates pairs of channels and needs an even head_dim, "
            "not 5",
        ),
        (
            lambda: PRESET.build(8, 2, options=rc.LayerOptions(rope_theta=1e4, key_dim=7)),
            "LayerOptions(rope_theta=...) rotates pairs of channels and needs an even key_dim, "
            "not 7",
        ),
    ],
)
def test_layer_errors_name_arguments(make: Callable[[], object], says: str) -> None:
    assert refusal(make) == says


def model(recipe: str = "delta_net", **sizes: Any) -> object:
    minimum = {
        "hidden_size": 12,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 16,
    }
    config = rc.lm.RecollectConfig.from_recipes(recipe, **{**minimum, **sizes})
    return rc.lm.RecollectForCausalLM(config)


CONFIGS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: model(num_attention_heads=5),
        "hidden_size = 12 is not a multiple of num_attention_heads = 5: choose other sizes, or "
        "give head_dim",
    ),
    (
        lambda: model("ffn_multi_head", num_attention_heads=5),
        "hidden_size = 12 is not a multiple of num_attention_heads = 5: choose other sizes",
    ),
    (
        lambda: model(num_attention_heads=4, num_key_value_heads=3),
        "num_attention_heads = 4 must be a multiple of num_key_value_heads = 3: several query "
        "heads share one memory, never the other way",
    ),
    (
        lambda: model("softmax_attention", num_attention_heads=4),
        "LayerOptions(rope_theta=...) rotates pairs of channels and needs an even hidden_size / "
        "num_attention_heads, not 3",
    ),
    (
        lambda: rc.lm.RecollectConfig(hidden_size=0),
        "RecollectConfig(hidden_size=...) must be a whole number from 1 to 2147483647, not 0",
    ),
    (
        lambda: rc.lm.RecollectConfig.from_recipes("gla", num_hidden_layers=10**6),
        "RecollectConfig(num_hidden_layers=...) must be a whole number from 1 to 10000, not "
        "1000000",
    ),
]


@pytest.mark.parametrize(("make", "says"), CONFIGS)
def test_config_errors_name_fields(make: Callable[[], object], says: str) -> None:
    pytest.importorskip("transformers")
    assert refusal(make) == says


def test_config_error_of_too_few_parameters() -> None:
    pytest.importorskip("transformers")
    config = rc.lm.RecollectConfig.from_recipes(
        "gla", vocab_size=16, hidden_size=12, num_attention_heads=2, num_hidden_layers=1
    )
    result = refusal(lambda: rc.lm.match_parameters([config], 1))
    assert result.endswith("than the 1 asked for; raise target or lower hidden_size")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            {"width": 12, "heads": 5},
            "[model] width = 12 is not a multiple of [model] heads = 5: choose other sizes, or "
            "give [model] key_dim",
        ),
        (
            {"width": 12, "heads": 4, "kv_heads": 3},
            "[model] heads = 4 must be a multiple of [model] kv_heads = 3: several query heads "
            "share one memory, never the other way",
        ),
        (
            {"recipe": "softmax_attention", "width": 12, "heads": 2, "key_dim": 3},
            "LayerOptions(rope_theta=...) rotates pairs of channels and needs an even [model] "
            "key_dim, not 3",
        ),
        ({"depth": 10**6}, "[model] depth must be a whole number from 1 to 10000, not 1000000"),
        (
            {"width": 2**31, "heads": 1},
            "[model] width must be a whole number from 1 to 2147483647, not 2147483648",
        ),
        (
            {"mlp": 2**31},
            "[model] mlp must be a whole number from 0 to 2147483647, not 2147483648",
        ),
        (
            {"recipe": "gla", "width": 12, "heads": 2, "parameters": 1},
            "raise [model] parameters or lower [model] width",
        ),
    ],
)
def test_plan_errors_name_keys(table: dict[str, Any], says: str) -> None:
    pytest.importorskip("transformers")
    from recollect.lm.data.tokenizers import byte_tokenizer
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.setup import build_model

    tables = {"model": table, "data": {"train": "a.txt"}, "optimizer": {"steps": 1}}
    plan = TrainPlan.from_dict(tables)
    assert says in refusal(lambda: build_model(plan, byte_tokenizer()))


def test_saved_model_errors_name_its_fields(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import save_file

    from recollect.lm.data.tokenizers import byte_tokenizer
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.setup import build_model

    config = rc.lm.RecollectConfig.from_recipes("gla", hidden_size=12, num_attention_heads=5)
    config.save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    tables = {"model": {"start": str(tmp_path)}, "data": {"train": "a"}, "optimizer": {"steps": 1}}
    plan = TrainPlan.from_dict(tables)
    result = refusal(lambda: build_model(plan, byte_tokenizer()))
    assert "hidden_size = 12 is not a multiple of num_attention_heads = 5" in result


MQAR: dict[str, Any] = {"width": 12, "depth": 1, "heads": 1, "length": 48}

COMPARISONS = [
    (
        {"heads": 5},
        "{0}width = 12 is not a multiple of {0}heads = 5: choose other sizes",
    ),
    (
        {"parameters": 1},
        "than the 1 asked for; raise {0}parameters or lower {0}width",
    ),
    (
        {"models": "softmax_attention", "key_dim": 3},
        "needs an even {1}, not 3",
    ),
    (
        {"models": "softmax_attention", "heads": 4},
        "needs an even {0}width / {0}heads, not 3",
    ),
    ({"depth": 10**6}, "{0}depth must be a whole number from 1 to 10000, not 1000000"),
    ({"jobs": 0}, "jobs must be a whole number >= 1, not 0"),
]


@pytest.mark.parametrize(("changes", "says"), COMPARISONS)
def test_comparison_errors_name_sizes(changes: dict[str, Any], says: str) -> None:
    pytest.importorskip("transformers")
    from recollect.experiments.comparison.results import DEFAULTS

    changes = {**MQAR, **changes}
    chosen = [changes.pop("models", "gla")]
    arguments = {name: changes.pop(name) for name in ("parameters", "jobs") if name in changes}
    sizes = {"mqar": DEFAULTS["mqar"].replace(**changes)}
    result = refusal(lambda: rc.compare(chosen, ["mqar"], sizes=sizes, **arguments))
    assert result.endswith(says.format("", "key_dim"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *COMPARISONS,
        ({"jobs": 0}, "recollect compare: --jobs must be a whole number >= 1, not 0"),
        ({"width": 0}, "recollect compare: --width must be a whole number >= 1, not 0"),
        ({"steps": 0}, "recollect compare: --steps must be a whole number >= 1, not 0"),
        ({"tokens": 0}, "recollect compare: --tokens must be a whole number >= 1, not 0"),
        ({"lr": -1}, "recollect compare: --lr must be a finite number > 0, not -1.0"),
        ({"steps": 1, "tokens": 1}, "--steps and --tokens exclude each other"),
    ],
)
def test_command_line_errors_name_options(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    from recollect.cli import build

    options = {"models": "gla", "task": "mqar", "out": tmp_path, **MQAR, **changes}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = CliRunner().invoke(build(), ["compare", *words])
    assert result.exit_code == 2, result.output
    assert says.format("--", "--key-dim") in result.stderr


def test_steps_of_the_command_line_are_not_a_key_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    from recollect.cli import build

    config = tmp_path / "run.toml"
    config.write_text("[data]\ntrain = 'x'\n[optimizer]\nsteps = 3\n")
    result = CliRunner().invoke(build(), ["train", str(config), "--steps", "0"])
    assert result.exit_code == 2
    assert "recollect train: --steps must be a whole number >= 1, not 0" in result.stderr
    config.write_text("[data]\ntrain = 'x'\n[optimizer]\nsteps = 0\n")
    result = CliRunner().invoke(build(), ["train", str(config)])
    assert "[optimizer] steps must be a whole number >= 1, not 0" in result.stderr
