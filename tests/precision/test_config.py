"""A precision in configurations and files of runs, and its explanation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import recollect as rc
from recollect.lm.training.plan import ModelPlan, parse_precision

SIZES: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
HYBRID = ["gated_delta_net", "softmax_attention"]


def memories(model: torch.nn.Module) -> list[str | None]:
    return [part.precision for part in model.modules() if isinstance(part, rc.MemoryLayer)]


@pytest.mark.parametrize(
    ("precision", "layers"),
    [
        (None, [None, None]),
        ("tf32", ["tf32", "tf32"]),
        ({"gated_delta_net": "tf32"}, ["tf32", None]),
        ({"gated_delta_net": "tf32", "softmax_attention": "float32"}, ["tf32", "float32"]),
    ],
)
def test_layers_of_a_model(precision: Any, layers: list[str | None], tmp_path: Path) -> None:
    """One for all, or by recipe; saved and loaded with the model."""
    config = rc.lm.RecollectConfig.from_recipes(HYBRID, precision=precision, **SIZES)
    torch.manual_seed(0)
    model = rc.lm.RecollectForCausalLM(config).eval()
    assert memories(model) == layers
    model.save_pretrained(tmp_path)
    repeated = rc.lm.RecollectForCausalLM.from_pretrained(tmp_path).eval()
    assert repeated.config == config
    assert memories(repeated) == layers
    x = torch.arange(12)[None] % 16
    with torch.no_grad():
        assert torch.equal(model(x).logits, repeated(x).logits)


def test_configuration_without_a_precision() -> None:
    config = rc.lm.RecollectConfig.from_recipes("gated_delta_net", **SIZES)
    data = config.to_dict()
    data.pop("precision", None)
    old = rc.lm.RecollectConfig(**{k: v for k, v in data.items() if k != "transformers_version"})
    assert old == config
    assert old.precision is None


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("half", "must be 'float32' or 'tf32', or one of these by recipe, not 'half'"),
        (16, "must be 'float32' or 'tf32'"),
        ({"gated_delta_net": "fp8"}, "must be 'float32' or 'tf32'"),
        ({"gated_delta_net": "bf16"}, "not 'bf16': .* use autocast or a bfloat16 model"),
        ({"titans": "tf32"}, "names the recipe 'titans', which is not among"),
    ],
)
def test_refused(precision: Any, message: str) -> None:
    with pytest.raises(rc.RecipeError, match=message):
        rc.lm.RecollectConfig.from_recipes("gated_delta_net", precision=precision, **SIZES)


def test_a_composition_hands_it_to_its_parts() -> None:
    both = rc.blocks.MemoryAsGate("gated_delta_net", "sliding_window_attention")
    layer = rc.blocks.build(both, d_model=16, num_heads=2, precision="tf32")
    assert memories(layer) == ["tf32", "tf32"]
    config = rc.lm.RecollectConfig.from_recipes({"both": both}, precision={"both": "tf32"}, **SIZES)
    assert set(memories(rc.lm.RecollectForCausalLM(config))) == {"tf32"}


def test_the_file_of_a_run() -> None:
    assert ModelPlan(precision="tf32").precision == "tf32"
    assert ModelPlan(precision={"titans": "tf32"}).precision == {"titans": "tf32"}
    for value in ("fp16", 16, {"titans": "double"}, "bf16"):
        with pytest.raises(ValueError, match="must be 'float32' or 'tf32', or a table"):
            parse_precision(value)
    with pytest.raises(ValueError, match=r"precision must .* use autocast or a bfloat16 model"):
        ModelPlan(precision="bf16")
    with pytest.raises(ValueError, match="leave out precision"):
        ModelPlan(start="model", precision="tf32")


@pytest.mark.parametrize(
    ("name", "precision", "message"),
    [
        ("gated_delta_net", "tf32", "products of TF32 where the device has it, added in float32"),
        ("geometric_rls", "float32", "products of float32"),
        ("geometric_rls", "tf32", "products of float32, not tf32: some of its statistics"),
        ("mesa_net", "tf32", "products of float32, not tf32: conjugate gradients"),
        ("local_linear_attention", "tf32", "products of float32, not tf32: the system of a fit"),
        ("titans_mac", "tf32", "products of TF32 where the device has it, added in float32"),
    ],
)
def test_explain_states_the_precision(name: str, precision: str, message: str) -> None:
    assert message in str(rc.explain(name, precision=precision))
    assert "products of" not in str(rc.explain(name))


def test_explain_refuses_unknown_precisions() -> None:
    with pytest.raises(ValueError, match=r"^precision must be"):
        rc.explain("titans", precision="fp8")
