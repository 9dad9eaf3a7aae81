"""`rc.trace`: reads after each token, against a loop over full prefixes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

import recollect as rc

T = 7
PRESETS = (
    *("gated_delta_net", "delta_product", "titans", "softmax_attention"),
    *("sliding_window_attention", "elastic_net", "bilinear_gated_attention"),
)


def loop(layer: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute every entry with a new memory of the prefix, read at a single key."""
    inputs, n = layer.memory_inputs(x), layer.recipe.associations_per_token
    k = inputs.k if n > 1 else inputs.k.unsqueeze(3)
    v = inputs.v if n > 1 else inputs.v.unsqueeze(3)
    tokens, heads = x.shape[1], v.shape[2]
    cosine = torch.full((tokens, tokens * n, heads), math.nan)
    error = torch.full((tokens, tokens * n, heads), math.nan)
    for t in range(tokens):
        prefix = {name: gate[:, : t + 1] for name, gate in inputs.gates.items()}
        _, state = rc.recall(
            layer.recipe,
            *(inputs.q[:, : t + 1], inputs.k[:, : t + 1], inputs.v[:, : t + 1]),
            prefix,
            params=inputs.params,
            initial_memory=layer.initial_memory,
            engine="reference",
        )
        for s in range(n * (t + 1)):
            token = {"tau": t}  # the threshold of the memory after t; other gates are the query's
            gates = {
                name: inputs.gates[name][:, [token.get(name, s // n)]]
                for name in layer.recipe.read_gates
            }
            key, value = k[:, [s // n], :, s % n], v[0, s // n, :, s % n]
            y = rc.read(layer.recipe, key, state=state, gates=gates, params=inputs.params)[0, 0]
            for h in range(heads):
                a, b = y[h].tolist(), value[h].tolist()
                dot = sum(i * j for i, j in zip(a, b, strict=True))
                cosine[t, s, h] = dot / (math.hypot(*a) * math.hypot(*b))
                error[t, s, h] = math.dist(a, b) / math.hypot(*b)
    return cosine, error


@pytest.mark.parametrize("name", PRESETS)
def test_a_trace_is_a_loop_over_prefixes(name: str) -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=12, num_heads=2)
    x = torch.randn(1, T, 12)
    with torch.no_grad():
        cosine, error = loop(layer, x)
    result = rc.trace(layer, x)
    assert result.tokens == tuple(map(str, range(T)))
    torch.testing.assert_close(result.cosine_similarity, cosine, atol=1e-4, rtol=0, equal_nan=True)
    torch.testing.assert_close(result.relative_error, error, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_attention_to_the_nearest_of_three_keys_returns_the_last_three_values() -> None:
    torch.manual_seed(0)
    recipe = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        context=rc.context.KernelWeighted(
            kernel=rc.features.Exponential(temperature=1e-3),
            restrictions=(rc.context.Window(size=3, gated=False),),
        ),
        retention=rc.retention.Keep(),
        algorithm=rc.algorithm.Analytic(),
    )
    result = rc.trace(rc.MemoryLayer(12, 2, recipe), torch.randn(1, T, 12))
    age = torch.arange(T)[:, None] - torch.arange(T)
    assert (result.relative_error[(age >= 0) & (age < 3)] < 1e-3).all()
    assert (result.relative_error[age >= 3] > 0.01).all()
    assert result.cosine_similarity[age < 0].isnan().all()


def tiny_model() -> rc.lm.RecollectForCausalLM:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        "gated_delta_net",
        vocab_size=256,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return rc.lm.RecollectForCausalLM(config)


def test_a_model_is_traced_on_a_text_with_its_words() -> None:
    model = tiny_model()
    from recollect.lm.data.tokenizers import byte_tokenizer

    text = "a b\nc"
    result = rc.trace(model, text, tokenizer=byte_tokenizer())
    assert result.tokens == ("a", "␣", "b", "\\n", "c")
    block = model.model.blocks[0]
    ids = torch.tensor([[*text.encode()]])
    x = block.memory_norm(model.get_input_embeddings()(ids))
    direct = rc.trace(block.layer, x, tokens=list("abcde"))
    torch.testing.assert_close(result.cosine_similarity, direct.cosine_similarity, equal_nan=True)
    second = rc.trace(model, ids, layer=1)
    assert second.layer == "model.blocks.1.layer" and second.tokens[:2] == ("0", "1")
    named = rc.trace(model, ids[0].tolist(), layer=second.layer)
    torch.testing.assert_close(
        second.relative_error, named.relative_error, equal_nan=True, atol=0, rtol=0
    )
    assert not torch.allclose(second.cosine_similarity[-1], result.cosine_similarity[-1])


def test_a_trace_is_a_table_data_and_a_picture() -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get("delta_product").build(d_model=8, num_heads=2)
    result = rc.trace(layer, torch.randn(1, 3, 8), tokens=["the", "old", "map"])
    lines = str(result).splitlines()
    assert lines[0] == "2 heads, 3 tokens"
    assert [line.split()[:3] for line in lines[2:8]] == [
        [str(t), word, str(i)] for t, word in enumerate(result.tokens) for i in (1, 2)
    ]
    cosine = result.cosine_similarity.mean(-1)
    assert f"{cosine[1, 2]:.3g} → {cosine[2, 2]:.3g}" in lines[4]
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["associations"][:3] == ["the 1", "the 2", "old 1"]
    assert data["cosine_similarity"][0][2] == [None, None]
    assert data["relative_error"][2][5][1] == pytest.approx(result.relative_error[2, 5, 1].item())
    assert rc.Recipe.from_dict(data["recipe"]) == layer.recipe
    assert "old 2" in result._repr_html_()
    single = rc.zoo.get("gla").build(d_model=8, num_heads=1)
    assert str(rc.trace(single, torch.randn(1, 1, 8))).startswith("1 head, 1 token\n")

    pytest.importorskip("matplotlib")
    mean, first = result.plot("words"), result.plot("words", head=0)
    assert mean.png[:4] == b"\x89PNG" and mean.svg != first.svg
    assert mean.svg == result.plot("words").svg
    with pytest.raises(ValueError, match="head must be from 0 to 1, not 2"):
        result.plot(head=2)


def test_an_association_without_a_value_has_no_error() -> None:
    torch.manual_seed(0)
    recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(updates_per_token=2))
    layer = rc.MemoryLayer(8, 2, recipe, rc.LayerOptions(zero_values=1))
    result = rc.trace(layer, torch.randn(1, 3, 8))
    rows = [line.split()[-6:] for line in str(result).splitlines()[2:8]]
    assert [row == ["–", "→", "–"] * 2 for row in rows] == [True, False] * 3
    assert "inf" not in str(result) and "nan" not in str(result)
    second = result.relative_error[2, 1::2]
    assert second.isfinite().all() and result.relative_error[2, ::2].isnan().all()
    assert result.cosine_similarity[2, ::2].isnan().all()
    assert rows[1][4:] == ["→", f"{second[0].mean():.3g}"]


def test_inputs_that_cannot_be_traced_are_one_sentence() -> None:
    layer = rc.zoo.get("gla").build(d_model=8, num_heads=2)
    x = torch.randn(2, 3, 8)
    model = tiny_model()
    composed = rc.blocks.build(
        rc.blocks.MemoryAsContext("titans", "softmax_attention", segment=2), d_model=8, num_heads=2
    )
    for call, error, message in (
        (lambda: rc.trace(layer, x), ValueError, "one sequence"),
        (lambda: rc.trace(layer, x[:1, :0]), ValueError, "one sequence"),
        (lambda: rc.trace(layer, "a text"), ValueError, "tensor \\[1, T, 8\\]"),
        (lambda: rc.trace(layer, x[:1].double()), ValueError, "float64"),
        (lambda: rc.trace(layer, x[:1], tokens=["a"]), ValueError, "3 words"),
        (lambda: rc.trace(layer, torch.randn(1, 513, 8)), ValueError, "at most 512"),
        (lambda: rc.trace(model, "a text"), ValueError, "needs its tokenizer"),
        (lambda: rc.trace(model, [1, 2], layer=2), ValueError, "layer must be from 0 to 1"),
        (lambda: rc.trace(model, torch.ones(2, 3).long()), ValueError, "\\[T\\] or \\[1, T\\]"),
        (lambda: rc.trace(torch.nn.Linear(8, 8), x[:1]), rc.RecipeError, "no rc.MemoryLayer"),
        (lambda: rc.trace("gla", x), rc.RecipeError, "a layer or a model, not str"),
        (
            lambda: rc.trace(composed, x[:1], layer="parts.attention"),
            rc.RecipeError,
            "called 3 times",
        ),
    ):
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
