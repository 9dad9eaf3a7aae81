"""MLPs of decoders that learn in place: exact start, a loop over chunks, and all kinds of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect as rc

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from recollect.lm import cache_of, replace_attention, replace_mlp
from recollect.lm.model.cache import CACHE_KEY
from recollect.lm.replacement.mlp import InPlaceMLP, _find_mlps

SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHUNK, RATE = 4, 0.3
DESCENT = rc.algorithm.GradientDescent(batch_size=CHUNK, lr=RATE, update_every="batch")
RECIPE = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=DESCENT)
TOL = {"atol": 1e-10, "rtol": 1e-10}
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def decoder(kind: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "qwen2":
        net: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    else:
        net = LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True))
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.3)
    return net.eval().double()


def learner(kind: str = "llama", layers: list[int] | None = None) -> PreTrainedModel:
    """A decoder whose MLPs learn in place, with random maps to values."""
    net = decoder(kind)
    replace_mlp(net, RECIPE, layers)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "target" in name or "proj.bias" in name:
                nn.init.normal_(weight, std=0.5)
    return net


def text(rows: int = 1, count: int = 15) -> Tensor:
    return torch.randint(3, 30, (rows, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(net: PreTrainedModel, ids: Tensor, **arguments: Any) -> Tensor:
    return net(ids, **arguments).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_start_is_exact(kind: str) -> None:
    """Zero maps to values change nothing; afterwards the first chunk of the layer is unchanged."""
    net, ids = decoder(kind), text(2)
    expected, generated = logits(net, ids), net.generate(ids, **GREEDY)
    report = replace_mlp(net, RECIPE)
    assert [layer.index for layer in report.layers] == [0, 1, 2]
    assert all(sum(layer.new.values()) == 16 * (16 + 4) for layer in report.layers)
    torch.testing.assert_close(logits(net, ids), expected, **TOL)
    assert torch.equal(net.generate(ids, **GREEDY), generated)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, InPlaceMLP):
                nn.init.normal_(module.target.weight)
    changed = logits(net, ids) - expected
    torch.testing.assert_close(changed[:, :CHUNK], torch.zeros_like(changed[:, :CHUNK]), **TOL)
    assert changed[:, CHUNK:].abs().amax((0, 2)).min() > 1e-3


def test_the_module_is_the_loop_of_the_paper() -> None:
    """O = Z Wᵀ of a chunk, then W ← W + η V̂ᵀ Z, the target of a token being the next one's."""
    net, ids, recorded = learner(), text(2), dict[str, Tensor]()
    module = net.model.layers[1].mlp

    def read(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        recorded.update(x=args[0], y=output)

    module.register_forward_hook(read)
    logits(net, ids)
    with torch.no_grad():
        x, embeddings = recorded["x"], net.model.embed_tokens(ids)
        g, u = x @ module.gate_proj.weight.T, x @ module.up_proj.weight.T
        g, u = g + module.gate_proj.bias, u + module.up_proj.bias
        z = g * g.sigmoid() * u
        taps = module.target_conv.weight
        W = module.down_proj.weight.expand(2, -1, -1)
        outputs = []
        for t in range(ids.shape[1]):
            if t % CHUNK == 0:
                start = W
            outputs.append(torch.einsum("bof,bf->bo", start, z[:, t]) + module.down_proj.bias)
            if t:
                past = [(j, t - 3 + j) for j in range(4) if t - 3 + j >= 0]
                value = sum(taps[j] * embeddings[:, s] for j, s in past) @ module.target.weight.T
                W = W + RATE * value.unsqueeze(-1) * z[:, t - 1].unsqueeze(-2)
        torch.testing.assert_close(recorded["y"], torch.stack(outputs, 1), **TOL)


def test_gradients_reach_the_new_and_the_old_weights() -> None:
    net, ids = learner(), text(2)
    net(ids, labels=ids).loss.backward()
    for module in net.modules():
        if isinstance(module, InPlaceMLP):
            for name, weight in module.named_parameters():
                assert weight.grad is not None and weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("layers", [None, [1], [-1]])
def test_pieces_and_tokens_through_the_cache(layers: list[int] | None) -> None:
    net, ids = learner(layers=layers), text(2)
    expected = logits(net, ids)
    parts, cache = [], None
    with torch.no_grad():
        for piece in ids.split((6, 1, 1, 1, 6), dim=1):
            out = net(piece, **{CACHE_KEY: cache}, use_cache=True)
            cache = cache_of(out)
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, **TOL)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    net, ids = learner(), text(2)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(10, None)] = 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    y = logits(net, ids, attention_mask=mask, position_ids=position)
    single = logits(net, ids[:1, mask[0].bool()])
    torch.testing.assert_close(y[:1, mask[0].bool()], single, **TOL)
    torch.testing.assert_close(y[1:], logits(net, ids[1:]), **TOL)


def test_packed_documents() -> None:
    net, ids = learner(), text(1)
    position = torch.cat([torch.arange(6), torch.arange(9)])[None]
    y = logits(net, ids, position_ids=position, use_cache=False)
    torch.testing.assert_close(y[:, :6], logits(net, ids[:, :6]), **TOL)
    torch.testing.assert_close(y[:, 6:], logits(net, ids[:, 6:]), **TOL)


def test_generation() -> None:
    """Greedy search equals full passes; beams, a padded batch and drafts give its tokens."""
    net, ids = learner(), text(1, 9)
    greedy = net.generate(ids, **GREEDY)
    full = ids
    for _ in range(greedy.shape[1] - ids.shape[1]):
        full = torch.cat([full, logits(net, full)[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, full)
    assert torch.equal(net.generate(ids, **GREEDY, prompt_lookup_num_tokens=3), greedy)
    beams = net.generate(ids, **GREEDY, num_beams=3)
    without = net.generate(ids, **GREEDY, num_beams=3, use_cache=False)
    assert torch.equal(beams, without)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = (padded != 0).long()
    assert torch.equal(net.generate(padded, attention_mask=mask, **GREEDY)[:, 4:], greedy)


def test_a_saved_model_is_loaded_with_its_replacements(tmp_path: Path) -> None:
    net, ids = learner(layers=[0, 2]), text(2)
    replace_attention(net, "gated_delta_net", [1])
    expected = logits(net, ids)
    net.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert sum(isinstance(m, InPlaceMLP) for m in loaded.modules()) == 2
    torch.testing.assert_close(logits(loaded, ids), expected, **TOL)
    assert list(net.config.all_recipes()) == ["MLPs of layers 0, 2", "layers 1"]


def test_mlps_with_another_formula_are_refused() -> None:
    class Sparse(type(decoder().model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            units = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            return self.down_proj(units * (units > units.mean()))

    net = decoder()
    net.model.layers[1].mlp.__class__ = Sparse
    with pytest.raises(ValueError, match=r"model.layers.1.mlp is not a plain gated MLP"):
        replace_mlp(net, RECIPE)
    assert not any(isinstance(module, InPlaceMLP) for module in net.modules())


def test_mlps_of_a_vision_tower_remain() -> None:
    net = decoder()
    tower = nn.Module()
    tower.layers = nn.ModuleList([nn.Module() for _ in range(2)])
    for layer, source in zip(tower.layers, decoder().model.layers, strict=False):
        layer.mlp = source.mlp
    net.model.vision_tower, net.model.language_model = tower, nn.Module()
    net.model.language_model.layers = net.model.layers
    del net.model.layers
    names = [name for name, _ in _find_mlps(net).values()]
    assert names == [f"model.language_model.layers.{i}.mlp" for i in range(3)]


def test_refusals() -> None:
    relu = RECIPE.replace(features=rc.features.Relu())
    with pytest.raises(rc.RecipeError, match="this recipe does not fit: it needs lr"):
        replace_mlp(decoder(), rc.Recipe())
    with pytest.raises(rc.RecipeError, match="its keys are lifted or its map is deep"):
        replace_mlp(decoder(), relu)
    with pytest.raises(rc.RecipeError, match="must be at least 1"):
        replace_mlp(decoder(), RECIPE, conv_size=0)
    with pytest.raises(ValueError, match="has an MLP that could be replaced in layers 0, 1, 2"):
        replace_mlp(decoder(), RECIPE, [7])
    with pytest.raises(ValueError, match="learn in place already"):
        replace_mlp(learner(), RECIPE)
    ours = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=30, hidden_size=16)
    with pytest.raises(TypeError, match="expected a model of transformers, not str: load it by"):
        rc.lm.replace_mlp("a/llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no MLP that could learn in place"):
        rc.lm.replace_mlp(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no MLP that could learn in place"):
        replace_mlp(rc.lm.RecollectForCausalLM(ours), RECIPE)
    net, ids = learner(), text()
    with pytest.raises(RuntimeError, match="call the model"):
        net.model.layers[0].mlp(torch.zeros(1, 3, 16).double())
    with pytest.raises(ValueError, match="needs a dynamic cache, not a StaticCache"):
        net(ids, **{CACHE_KEY: StaticCache(config=net.config, max_cache_len=20)})
    enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    loss = net.train()(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="without gradient checkpointing"):
        loss.backward()
