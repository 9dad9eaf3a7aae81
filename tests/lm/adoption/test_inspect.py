"""`explain`, `diagnose` and `cost` of models: adopted ones, the library's own, and a user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.lm.adoption.models import make_model

import recollect as rc
from recollect.layer import InspectableLayer, MemorySpec
from recollect.lm import MemoryArguments

OPTIONS = {
    "qwen3_5_text": {"linear_value_head_dim": 6},
    "kimi_linear": {},
    "mamba2": {"state_size": 6},
    "mamba": {},
}
"""One model of each family, if possible with keys and values of different sizes."""
EQUATIONS = ("problem", "write", "read")


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(1))


def states(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the memories in the model's cache after the tokens."""
    with torch.no_grad():
        cache = rc.lm.cache_of(model(ids, use_cache=True))
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [layer.recurrent_states[0] for layer in layers]


@pytest.mark.parametrize("name", OPTIONS)
def test_norms_and_bytes_are_those_of_the_original_cache(name: str) -> None:
    model, ids = make_model(name, **OPTIONS[name]), tokens()
    expected = states(model, ids)
    report = rc.lm.adopt(model)
    diagnosis, price = rc.diagnose(model, ids), rc.cost(model, T=12)
    names = [layer.name for layer in report.adopted]
    assert [*diagnosis.layers] == [*price.layers] == names
    for layer, state in zip(names, expected, strict=True):
        diagnosed = diagnosis.layers[layer]
        norm = state.reshape(2, diagnosed.heads, -1).norm(dim=-1).mean(0)
        torch.testing.assert_close(diagnosed.memory["W"][-1], norm, rtol=1e-4, atol=1e-6)
        assert diagnosed.first_fault is None and diagnosed.loss.isfinite().all()
        assert diagnosed.positions.tolist() == list(range(13))
        assert price.layers[layer].state["memory"] == state[0].nbytes
    assert str(diagnosis).count("engine linear") == len(names)
    assert all(layer in str(diagnosis) for layer in names)
    assert [*diagnosis.to_dict()["layers"]] == names
    # The number of sequences is a factor, and the model takes a list of tokens as well.
    assert rc.cost(model, T=12, B=3).state_bytes == 3 * price.state_bytes
    assert rc.diagnose(model, [3, 4, 5]).layers[names[0]].loss.shape[0] == 3
    report.undo()
    with pytest.raises(rc.RecipeError, match=r"rc\.lm\.adopt"):
        rc.explain(model)


def test_equal_layers_of_an_adopted_model_are_explained_once() -> None:
    model = make_model("qwen3_5_text", **OPTIONS["qwen3_5_text"])
    rc.lm.adopt(model)
    explanation = rc.explain(model)
    (group,) = explanation.groups
    assert group.names == ("model.layers.0.linear_attn", "model.layers.2.linear_attn")
    assert group.sizes == {"H": 4, "K": 8, "V": 6}
    text = str(explanation)
    assert "2 × Qwen3_5GatedDeltaNet (gated delta net)" in text
    assert "model.layers.{0, 2}.linear_attn" in text
    assert "engine   linear (triangular solve)" in text
    expected = rc.explain(rc.zoo.get("gated_delta_net").recipe)
    for name in EQUATIONS:
        assert text.count(f"\n{name}") == 1
        assert dict(group.explanation.blocks)[name] == dict(expected.blocks)[name]
    assert explanation.to_dict()["groups"][0]["explanation"]["engine"] == "linear"
    layer = model.get_submodule(group.names[0])
    assert str(rc.explain(layer)) == str(group.explanation)


def test_engines_of_adopted_layers_are_explained() -> None:
    model = make_model("mamba2")
    rc.lm.adopt(model, engine="reference")
    (group,) = rc.explain(model).groups
    assert group.explanation.engine == "reference"
    assert rc.explain(model, engine="linear").groups[0].explanation.engine == "linear"
    assert {cost.engine for cost in rc.cost(model).layers.values()} == {"reference"}
    (first, _) = rc.diagnose(model, tokens(4)).layers.values()
    assert first.engine == "reference"


def test_the_cost_of_a_model_is_the_sum_of_its_memories() -> None:
    model = make_model("qwen3_5_text", **OPTIONS["qwen3_5_text"])
    rc.lm.adopt(model)
    price = rc.cost(model, T=256)
    recipe = rc.zoo.get("gated_delta_net").recipe
    one = rc.cost(recipe, K=8, V=6, H=4, T=256)
    for name in ("total", "decode", "state_bytes", "state_bytes_per_token"):
        assert getattr(price, name) == 2 * getattr(one, name), name
    others = {"Embedding": 1, "Qwen3_5MLP": 3, "Qwen3_5Attention": 1, "Linear": 1}
    assert price.not_counted == others
    text = str(price)
    assert text.splitlines()[0] == "Qwen3_5ForCausalLM: 2 memory layers, one sequence of 256 tokens"
    assert "1 × Qwen3_5Attention" in text and "\ntotal" in text
    assert price.to_dict()["total"] == price.total
    assert rc.cost(model.get_submodule("model.layers.0.linear_attn"), T=256) == one
    with pytest.raises(ValueError, match="leave out K, V, H and G"):
        rc.cost(model, K=8)


def test_faults_and_dtypes_of_adopted_layers() -> None:
    model = make_model("mamba2")
    rc.lm.adopt(model)
    layer = model.get_submodule("backbone.layers.1.mixer")
    assert isinstance(layer, InspectableLayer)
    half = rc.diagnose(model.bfloat16(), tokens(4))
    assert all(one.first_fault is None for one in half.layers.values())
    model.float()
    with torch.no_grad():
        layer.dt_bias[3] = torch.nan
    first, second = rc.diagnose(model, tokens(4)).layers.values()
    assert first.first_fault is None
    assert second.first_fault is not None and second.first_fault.quantity == "param dt_bias"
    assert any(
        "backbone.layers.1.mixer: param dt_bias" in x
        for x in rc.diagnose(model, tokens(4)).findings
    )
    with pytest.raises(ValueError, match=r"\[B, T, 32\]"):
        rc.diagnose(layer, torch.zeros(1, 3, 31))


def test_models_of_the_library_with_compositions() -> None:
    config = rc.lm.RecollectConfig.from_recipes(
        ["gated_delta_net", "titans_mac", "gated_delta_net"],
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = rc.lm.RecollectForCausalLM(config).eval()
    explanation, price = rc.explain(model), rc.cost(model, T=64)
    assert [group.names for group in explanation.groups] == [
        ("model.blocks.0.layer", "model.blocks.2.layer"),
        ("model.blocks.1.layer",),
    ]
    mixer = model.get_submodule("model.blocks.1.layer").mixer
    assert price.layers["model.blocks.1.layer"] == rc.cost(mixer, K=8, V=8, H=2, T=64)
    assert price.layers["model.blocks.0.layer"] == rc.cost("gated_delta_net", K=8, V=8, H=2, T=64)
    diagnosis = rc.diagnose(model, tokens(6)[:1])
    assert [*diagnosis.layers] == [
        "model.blocks.0.layer",
        "model.blocks.1.layer.memory",
        "model.blocks.1.layer.attention",
        "model.blocks.2.layer",
    ]
    with torch.no_grad():
        x = model.model.blocks[0].memory_norm(model.model.embed_tokens(tokens(6)[:1]))
    expected = rc.diagnose(model.model.blocks[0].layer, x)
    assert str(expected) == str(diagnosis.layers["model.blocks.0.layer"])


class UserLayer(nn.Module):
    """A layer of a user: DeltaNet with one memory and steps of one half."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)
        self.memory_spec = MemorySpec(
            recipe=rc.Recipe(), d_model=4, num_kv_heads=1, head_dim=4, value_dim=4
        )

    def memory_inputs(self, x: Tensor) -> MemoryArguments:
        q, k, v = self.qkv(x).unsqueeze(2).chunk(3, -1)
        k = nn.functional.normalize(k, dim=-1)
        return MemoryArguments(q=q, k=k, v=v, gates={"lr": torch.full_like(k[..., 0], 0.5)})

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.memory_inputs(x)
        y, _ = rc.recall(self.memory_spec.recipe, inputs.q, inputs.k, inputs.v, inputs.gates)
        return x + y.flatten(2)


@pytest.fixture
def user_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(UserLayer(), nn.Linear(4, 4), UserLayer())


def test_a_layer_of_a_user(user_model: nn.Sequential) -> None:
    x = torch.randn(1, 5, 4)
    with torch.no_grad():
        inputs = user_model[0].memory_inputs(x)
        W, norms, losses = torch.zeros(4, 4), [0.0], []
        for t in range(5):
            k, v = inputs.k[0, t, 0], inputs.v[0, t, 0]
            error = W @ k - v
            losses.append(0.5 * error.square().sum().item())
            W = W - 0.5 * torch.outer(error, k)
            norms.append(W.norm().item())
    diagnosis = rc.diagnose(user_model, x)
    assert [*diagnosis.layers] == ["0", "2"]
    diagnosed = diagnosis.layers["0"]
    torch.testing.assert_close(diagnosed.memory["W"][:, 0], torch.tensor(norms))
    torch.testing.assert_close(diagnosed.loss[:, 0], torch.tensor(losses))
    torch.testing.assert_close(diagnosed.step, torch.full((5, 1), 0.5))
    assert not diagnosed.saturated
    assert str(rc.diagnose(user_model[0], x)) == str(diagnosed)
    (group,) = rc.explain(user_model).groups
    assert (group.title, group.names) == ("UserLayer", ("0", "2"))
    assert rc.cost(user_model).not_counted == {"Linear": 1}


def test_refusals(user_model: nn.Sequential) -> None:
    for function in (rc.explain, rc.cost, lambda model: rc.diagnose(model, [1, 2])):
        with pytest.raises(rc.RecipeError, match=r"rc\.MemoryLayer, not Linear"):
            function(nn.Linear(4, 4))
    with pytest.raises(rc.RecipeError, match="0 is called 2 times"):
        rc.diagnose(nn.Sequential(user_model[0], user_model[0]), torch.randn(1, 3, 4))
    model = make_model("mamba2")
    rc.lm.adopt(model)
    with pytest.raises(ValueError, match=r"\[T\] or \[B, T\]"):
        rc.diagnose(model, torch.zeros(1, 2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"T ≥ 1"):
        rc.diagnose(model, torch.zeros(1, 0, dtype=torch.long))
