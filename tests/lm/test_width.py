"""Rules for width: roles, learning rates and initial scales, in training and in saved models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recollect as rc

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from tests.lm.runs import Recorder, assert_same, plan, weights, write_text

from recollect.layer.memory_layer import MemoryLayer
from recollect.lm.mup.check_plan import default_widths
from recollect.lm.mup.roles import config_at_width
from recollect.lm.training import train
from recollect.lm.training.setup import build_model, build_tokenizer
from recollect.messages import RecipeError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")

BASE, WIDTH, M = 64, 256, 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "mine.jsonl")


def config(name: Any, width: int = WIDTH, **sizes: Any) -> rc.lm.RecollectConfig:
    stated = {"vocab_size": 48, "num_hidden_layers": 1, "num_attention_heads": width // 16}
    return rc.lm.RecollectConfig.from_recipes(name, hidden_size=width, **{**stated, **sizes})


# The role of each parameter, by hand: (role, end of its name). Parameters without these ends are
# inputs: embeddings, biases, norms, convolutions, decays, initial memories, the second map of a low
# rank.
HIDDEN = ("qkv.weight", "out.weight", "output_gate.weight", "gate_up.weight", "mlp.down.weight")
ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "gated_delta_net": {"hidden": (*HIDDEN, "gates.lr.weight", "gates.log_decay.weight")},
    "gla": {"hidden": HIDDEN, "output": ("log_decay.down",)},
    "softmax_attention": {"hidden": HIDDEN},
    "titans": {
        "hidden": (
            *HIDDEN,
            *("gates.lr.weight", "gates.log_decay.weight", "gates.momentum.weight"),
        )
    },
    "lru": {"hidden": HIDDEN},
    "rg_lru": {"hidden": HIDDEN, "output": ("log_decay.down", "lr.down")},
    "ffn_swiglu": {"hidden": (*HIDDEN, "layer.keys", "layer.values", "gates.gate_key")},
    # Heads that read one slice each: pairs of fixed channels, whose number grows with the width.
    "ffn_multi_head": {"hidden": HIDDEN, "output": ("layer.values",)},
    "titans_mac": {
        "hidden": (
            *HIDDEN,
            *("gates.lr.weight", "gates.log_decay.weight", "gates.momentum.weight"),
        )
    },
}


@pytest.mark.parametrize("name", ROLES)
def test_roles_of_parameters(name: str) -> None:
    expected = {"hidden": (), "output": (), **ROLES[name]}
    expected["output"] = (*expected["output"], "lm_head.weight")
    for path, rule in rc.lm.width_rules(config(name), BASE).items():
        role = next((role for role, ends in expected.items() if path.endswith(ends)), "input")
        assert rule.role == role, path
        assert rule.rate == (1.0 if role == "input" else 1 / M), path


def test_roles_of_low_rank_token_shifts() -> None:
    rules = rc.lm.width_rules(config("rwkv6", 1024), 256)
    assert rules["model.blocks.0.layer.shift.down"].role == "output"
    assert rules["model.blocks.0.layer.shift.up"].role == "input"
    assert rules["model.blocks.0.layer.shift.mix"].role == "input"


@pytest.mark.parametrize("spread", [None, 0.02])
def test_initial_scales_equal_the_table(spread: float | None) -> None:
    """Measured standard deviations: σ₀, σ₀/√m and σ₀/m."""
    torch.manual_seed(0)
    result = []
    for width in (BASE, WIDTH):
        model = rc.lm.RecollectForCausalLM(config("gla", width, initializer_range=spread))
        rc.lm.scale_for_width(model, BASE)
        result.append(
            {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() > 1}
        )
    base, wide = result
    layer = "model.blocks.0.layer."
    for name, power in {
        "model.embed_tokens.weight": 0.0,
        f"{layer}qkv.weight": 0.5,
        f"{layer}out.weight": 0.5,
        "model.blocks.0.mlp.down.weight": 0.5,
        f"{layer}gates.log_decay.down": 1.0,
        f"{layer}gates.log_decay.weight": 0.0,
        f"{layer}conv.weight": 0.0,
        "lm_head.weight": 1.0,
    }.items():
        # 600 entries or more: deviations are known to 3 in 100, and m^(1/2) is 2.
        assert wide[name] * M**power == pytest.approx(base[name], rel=0.1), name


def test_training_at_the_base_width_is_standard(text: Path, tmp_path: Path) -> None:
    one = train(plan(text, tmp_path / "one")).folder
    rules = {"parametrization": "mup", "base_width": 16}
    two = train(plan(text, tmp_path / "two", optimizer=rules)).folder
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_step_changes_every_weight_at_its_rate(text: Path, tmp_path: Path) -> None:
    """AdamW's first step is lr · sign(gradient), and decay is lr · weight decay · weight."""
    lr, decay = 0.01, 0.5
    run = plan(
        text,
        tmp_path,
        model={"width": 64, "heads": 4, "mlp": 32},
        optimizer={"steps": 1, "lr": lr, "warmup": 0, "clip": 0, "weight_decay": decay}
        | {"parametrization": "mup", "base_width": 16},
    )
    torch.manual_seed(run.run.seed)
    initial = build_model(run, build_tokenizer(run, tmp_path, None, None))  # type: ignore[arg-type]
    later = weights(train(run).folder)
    rate = {"qkv": 0.25, "lr": 0.25, "gate_up": 0.25, "lm_head": 0.25, "conv": 1.0}
    rate |= {"embed_tokens": 1.0, "norm": 1.0, "log_decay": 0.25}
    decays = ("qkv.weight", "gate_up.weight", "lm_head.weight", "embed_tokens.weight")
    recorded = set[str]()
    for name, weight in initial.named_parameters():
        parts = name.split(".")
        if name.endswith(".bias"):
            factor = 1.0
        else:
            known = [part for part in parts if part in rate]
            if not known:
                continue
            factor = rate[known[-1]]
            recorded.add(known[-1])
        decayed = weight.detach() * (1 - lr * decay * name.endswith(decays))
        moved = (later[name] - decayed).abs()
        moved = moved[moved > 1e-6]  # a byte that the text lacks has no gradient
        assert float(moved.median()) == pytest.approx(lr * factor, rel=0.01), name
    assert recorded == rate.keys()


@pytest.mark.slow
def test_stopped_run_resumes_with_its_rates(text: Path, tmp_path: Path) -> None:
    rules = {"parametrization": "mup", "base_width": 8}
    full = train(plan(text, tmp_path / "whole", optimizer=rules)).folder
    run = plan(text, tmp_path / "parts", optimizer=rules)

    with pytest.raises(KeyboardInterrupt):
        train(run, observer=Recorder(stop_after=3))
    assert_same(train(run, resume=True).folder, full)
    other = plan(text, tmp_path / "parts", optimizer={**rules, "base_width": 16})
    with pytest.raises(ValueError, match=r"started with \[optimizer\] base_width = 8, not 16"):
        train(other, resume=True)


def test_tied_output_divides_its_logits_and_is_saved(text: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = rc.lm.RecollectForCausalLM(config("gla", tie_word_embeddings=True)).eval()
    ids = torch.randint(48, (2, 8))
    initial = model(ids).logits
    rc.lm.scale_for_width(model, BASE)
    embedding = M**0.5  # the factor of the embedding, once in its read
    x = model.model(ids).last_hidden_state
    logits = x @ model.lm_head.weight.T / M
    assert model.config.logit_scale == 1 / M
    torch.testing.assert_close(model(ids).logits, logits)
    assert float((initial.std() / logits.std()).detach()) == pytest.approx(M / embedding, rel=0.2)
    model.train()
    chunked = model(ids, labels=ids).loss
    targets = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(chunked, targets)
    model.eval().save_pretrained(tmp_path / "saved")
    repeated = rc.lm.RecollectForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(repeated(ids).logits, logits)

    run = plan(text, tmp_path / "run", model={"tie": True})
    start = {"recipe": "gated_delta_net", "width": None, "depth": None, "heads": None, "mlp": None}
    saved = {**start, "tie": False, "start": str(train(run).folder)}
    rules = {"parametrization": "mup", "base_width": 8}
    with pytest.raises(ValueError, match=r"needs logit_scale = 0.5 .* and this model has 1: "):
        train(plan(text, tmp_path / "on", model=saved, optimizer=rules))


def test_custom_loop_has_equal_rates() -> None:
    model = rc.lm.RecollectForCausalLM(config("gated_delta_net"))
    groups = rc.lm.parameter_groups(model, lr=1e-2, weight_decay=0.1, base_width=BASE)
    stated = {
        id(p): (group["lr"], group["weight_decay"])
        for group in groups
        for p in group["params"]  # type: ignore[attr-defined]
    }
    for name, rule in rc.lm.width_rules(model.config, BASE).items():
        rate, decay = stated.pop(id(model.get_parameter(name)))
        assert rate == 1e-2 * rule.rate
        assert rate * decay in (0.0, pytest.approx(1e-3))  # type: ignore[comparison-overlap]
    assert not stated
    with pytest.raises(ValueError, match="pass lr, too"):
        rc.lm.parameter_groups(model, base_width=BASE)


@pytest.mark.parametrize(
    ("model", "base", "message"),
    [
        (("gla", 96, {}), 64, None),
        (("gla", 96, {}), 40, "6 heads of width 96 are 2.5 of width 40"),
        (("gla", 64, {"num_key_value_heads": 2}), 16, "2 kv_heads of width 64 are 0.5"),
        (("rwkv6", 256, {}), 16, "take another base_width|not the same kind of parameter"),
        (("gateloop", 256, {}), 16, "take another base_width|not the same kind of parameter"),
    ],
)
def test_uncovered_parameters_are_refused(
    model: tuple[str, int, dict[str, Any]], base: int, message: str | None
) -> None:
    name, width, sizes = model
    if message is None:
        rc.lm.width_rules(config(name, width, **sizes), base)
        return
    with pytest.raises(RecipeError, match=message):
        rc.lm.width_rules(config(name, width, **sizes), base)


def test_module_without_declarations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Undeclared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    begin = MemoryLayer.__init__

    def with_custom(self: MemoryLayer, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.custom = Undeclared()

    monkeypatch.setattr(MemoryLayer, "__init__", with_custom)
    with pytest.raises(RecipeError, match=r"custom\.scale: Undeclared declares no axes"):
        rc.lm.width_rules(config("gla"), BASE)


def test_keys_of_the_plan(text: Path, tmp_path: Path) -> None:
    assert (
        plan(text, tmp_path, optimizer={"parametrization": "mup"}).optimizer.mup_base_width == 256
    )
    assert plan(text, tmp_path).optimizer.mup_base_width is None
    with pytest.raises(ValueError, match=r'base_width needs parametrization = "mup"'):
        plan(text, tmp_path, optimizer={"base_width": 64})
    with pytest.raises(ValueError, match="parametrization"):
        plan(text, tmp_path, optimizer={"parametrization": "ntk"})


def test_another_width_has_heads_of_the_same_size() -> None:
    result = config("gla", 128, num_key_value_heads=4, intermediate_size=100)
    wide = config_at_width(result, 256)
    assert (wide.num_attention_heads, wide.num_key_value_heads) == (16, 8)
    assert wide.intermediate_size == 200
    assert math.isclose(wide.initializer_range, 1 / 16)
    assert config_at_width(config("gla", initializer_range=0.02), BASE).initializer_range == 0.02
    assert default_widths(result) == [64, 128, 256]
    assert default_widths(config("gla", 80, num_attention_heads=1)) == [80, 160, 320]


def test_logged_rate_is_the_stated_one() -> None:
    model = rc.lm.RecollectForCausalLM(config("gated_delta_net", 32))
    for base in (16, 32, 64):
        assert rc.lm.parameter_groups(model, lr=1e-3, base_width=base)[0]["lr"] == 1e-3


def test_other_models_are_refused() -> None:
    model = rc.lm.RecollectForCausalLM(config("gated_delta_net", 32))
    initial = {name: weight.clone() for name, weight in model.named_parameters()}
    for other in (model.model, torch.nn.Sequential(model), torch.nn.Linear(2, 2)):
        with pytest.raises(rc.RecipeError, match="pass the model itself"):
            rc.lm.scale_for_width(other, base_width=16)
    assert all(torch.equal(weight, initial[name]) for name, weight in model.named_parameters())
