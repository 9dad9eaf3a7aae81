"""The language model: exact saving, and equal outputs for every way to pass a text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import recollect as rc

pytest.importorskip("transformers")

from tests.lm.families import enable_checkpointing, every_family
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from recollect.lm import (
    RecollectConfig,
    RecollectForCausalLM,
    RecollectModel,
    cache_of,
    match_parameters,
    parameter_count,
)

VOCAB, T = 40, 11
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
# float32: logits are sums of a few hundred products of order 1.
TOL = {"atol": 1e-4, "rtol": 1e-4}


def config(recipes: object, **sizes: object) -> RecollectConfig:
    return RecollectConfig.from_recipes(
        recipes,  # type: ignore[arg-type]
        **{
            **SIZES,
            **sizes,
        },  # type: ignore[arg-type]
    )


def model(recipes: object, **sizes: object) -> RecollectForCausalLM:
    torch.manual_seed(0)
    return RecollectForCausalLM(config(recipes, **sizes)).eval()


def text(B: int = 2, length: int = T) -> Tensor:
    # No zeros: token 0 is padding.
    return torch.randint(1, VOCAB, (B, length), generator=torch.Generator().manual_seed(1))


HYBRID = {
    "deep": rc.Recipe(memory=rc.memory.MLP(), algorithm=rc.algorithm.GradientDescent(batch_size=4)),
    "attention": "softmax_attention",
}


# The layer of each preset is tested in `tests/test_layer.py`: here one of every family is fast.
@pytest.mark.parametrize("name", [*every_family(), "hybrid"])
def test_prefill_and_decode_are_one_forward(name: str) -> None:
    net, ids = model(HYBRID if name == "hybrid" else name), text()
    with torch.no_grad():
        full = net(ids).logits
        out = net(ids[:, :6])
        logits = [out.logits]
        for t in range(6, T):
            out = net(ids[:, t : t + 1], cache=cache_of(out))
            logits.append(out.logits)
    # Its systems of K(K + 3)/2 monomials have a condition that multiplies rounding by ten.
    tolerance = {"atol": 1e-3, "rtol": 1e-3} if name == "local_quadratic_attention" else TOL
    torch.testing.assert_close(torch.cat(logits, 1), full, **tolerance)
    assert cache_of(out).get_seq_length() == T


@pytest.mark.parametrize("name", ["gated_delta_net", "softmax_attention", "hybrid"])
def test_padded_rows_and_packed_documents_equal_single_texts(name: str) -> None:
    net, ids = model(HYBRID if name == "hybrid" else name), text()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        out = net(ids, attention_mask=mask, labels=labels)
        single = [net(ids[:1, 4:], labels=ids[:1, 4:]), net(ids[1:], labels=ids[1:])]
        torch.testing.assert_close(out.logits[:1, 4:], single[0].logits, **TOL)
        torch.testing.assert_close(out.logits[1:], single[1].logits, **TOL)
        # The mask grows with the text, as in generation.
        longer = torch.cat([mask, mask[:, -1:]], 1)
        more = net(ids[:, :1], attention_mask=longer, cache=cache_of(out)).logits
        one = net(ids[:1, :1], cache=cache_of(single[0])).logits
        torch.testing.assert_close(more[:1], one, **TOL)

        packed = torch.cat([ids[0, 4:], ids[1]])[None]
        borders = torch.tensor([0, T - 4, 2 * T - 4])
        both = net(packed, cu_seqlens=borders, labels=packed)
        want = torch.cat([single[0].logits[0], single[1].logits[0]])
        torch.testing.assert_close(both.logits[0], want, **TOL)
        # Tokens are not predicted across a boundary: the loss is that of the documents.
        counts = torch.tensor([T - 5.0, T - 1.0])
        mean = (torch.stack([a.loss for a in single]) * counts).sum() / counts.sum()
        torch.testing.assert_close(both.loss, mean, **TOL)
        torch.testing.assert_close(out.loss, mean, **TOL)


@pytest.mark.parametrize("name", ["gated_delta_net", "retnet", "hybrid"])
def test_save_and_load_are_exact(name: str, tmp_path: Path) -> None:
    net, ids = model(HYBRID if name == "hybrid" else name, tie_word_embeddings=True), text()
    net.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".md", ".safetensors"}
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(back) is RecollectForCausalLM
    assert torch.equal(back(ids).logits, net(ids).logits)
    assert back.config == net.config
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is RecollectModel
    assert torch.equal(base(ids).last_hidden_state, net.model(ids).last_hidden_state)


@pytest.mark.parametrize(
    ("hidden", "heads"), [(768, 12), (384, 12), (512, 8), (1024, 16), (1000, 10), (130, 2), (16, 1)]
)
def test_default_number_of_heads_divides_the_width(hidden: int, heads: int, tmp_path: Path) -> None:
    config = RecollectConfig.from_recipes("gla", hidden_size=hidden)
    assert config.num_attention_heads == config.num_key_value_heads == heads
    assert hidden % heads == 0 and hidden // heads >= min(hidden, 32)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == heads
    assert RecollectConfig.from_pretrained(tmp_path) == config


def test_explicit_number_of_heads_is_unchanged() -> None:
    config = RecollectConfig.from_recipes("gla", hidden_size=512, num_attention_heads=4)
    assert RecollectConfig.from_dict(config.to_dict()).num_attention_heads == 4
    # A file without the field has its former meaning if that gave a model.
    assert RecollectConfig.from_dict({"hidden_size": 96}).num_attention_heads == 12
    loaded = RecollectConfig.from_dict({"hidden_size": 512, "head_dim": 32})
    assert loaded.num_attention_heads == 12
    with pytest.raises(rc.RecipeError, match=r"num_attention_heads=.* whole number from 1"):
        RecollectConfig(num_attention_heads=0)


def test_config_contains_full_recipes(tmp_path: Path) -> None:
    result = config(["gla", "softmax_attention"], num_hidden_layers=3)
    result.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["schema"] == 2
    assert stored["layers"] == ["gla", "softmax_attention"]
    assert stored["recipes"]["gla"]["recipe"]["retention"]["per"] == "key"
    back = AutoConfig.from_pretrained(tmp_path)
    assert back == result
    assert back != config(["gla", "softmax_attention"], num_hidden_layers=4)
    assert back.layer_names == ["gla", "softmax_attention", "gla"]
    preset = rc.zoo.get("gla")
    assert back.recipe("gla") == (preset.recipe, preset.options)
    assert config(preset).recipe("gla") == back.recipe("gla")
    assert config(preset.recipe).layer_names == ["memory"] * 2


def test_loading_never_runs_code(tmp_path: Path) -> None:
    """An unregistered member is refused, and nothing is imported to find it."""

    @rc.member
    class Tilted(rc.bias.Bias):
        affine = (1.0, 2.0)

        def error(self, prediction: Tensor, value: Tensor, gates: object) -> Tensor:
            return prediction - 2 * value

    net, ids = model(rc.Recipe(bias=Tilted())), text()
    net.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, net(ids).logits)
    code = (
        "import recollect.lm\nfrom transformers import AutoModelForCausalLM as A\n"
        f"try: A.from_pretrained({str(tmp_path)!r})\n"
        "except recollect.RecipeError as error: print(error)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "no member named 'Tilted' is registered" in output.stdout


@pytest.mark.parametrize("name", ["gated_delta_net", "softmax_attention"])
def test_greedy_generation_is_argmax_with_padding_too(name: str) -> None:
    net, ids = model(name), text()
    ids[0, :4] = 0
    mask = (ids != 0).long()
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    result = net.generate(ids, attention_mask=mask, **how)
    want = ids[:1, 4:]
    with torch.no_grad():
        for _ in range(5):
            want = torch.cat([want, net(want).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(result[0, T:], want[0, -5:])
    beams = net.generate(ids, attention_mask=mask, num_beams=2, **how)
    single = net.generate(ids[:1, 4:], attention_mask=mask[:1, 4:], num_beams=2, **how)
    assert torch.equal(beams[0, T:], single[0, -5:])


def test_a_cache_can_be_continued_twice() -> None:
    net, ids = model("delta_net"), text()
    with torch.no_grad():
        cache = cache_of(net(ids))
        first = net(ids[:, :2], cache=cache).logits
        assert torch.equal(net(ids[:, :2], cache=cache).logits, first)
    assert cache.get_seq_length() == T
    longer = cache_of(net(text(length=2 * T)))
    assert longer.nbytes == cache.nbytes  # constant memory per sequence


def test_gradient_checkpointing_changes_nothing() -> None:
    net, ids = model(HYBRID).train(), text()

    def gradients() -> list[Tensor]:
        net.zero_grad()
        net(ids, labels=ids).loss.backward()
        return [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]

    plain = gradients()
    enable_checkpointing(net)
    assert net.model.gradient_checkpointing
    for a, b in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(a, b)


def test_bf16_and_autocast() -> None:
    net, ids = model("gated_delta_net"), text()
    exact = net(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = net(ids, labels=ids).loss
    half.backward()
    assert all(weight.grad.isfinite().all() for weight in net.parameters())
    assert half.dtype == torch.float32
    whole_half = net.bfloat16()(ids, labels=ids).loss
    for loss in (half, whole_half):
        assert loss.item() == pytest.approx(exact.item(), rel=0.03)


# The fast suite has every fifth preset.
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))]
)
def test_parameters_are_counted_and_matched(first: int) -> None:
    configs = [config(name, hidden_size=64) for name in rc.zoo.names()[first::5]]
    for result in configs[:4]:
        weights = RecollectForCausalLM(result).parameters()
        assert parameter_count(result) == sum(x.numel() for x in weights if x.requires_grad)
    target = max(parameter_count(result) for result in configs)
    matched = match_parameters(configs, target)
    for result, initial in zip(matched, configs, strict=True):
        assert abs(parameter_count(result) - target) < 0.012 * target
        assert result.intermediate_size % 8 == 0
        assert initial.intermediate_size == 168  # the fixed ones are unchanged
    with pytest.raises(ValueError, match="narrowest MLP"):
        match_parameters(configs, 1000)


def test_a_tied_output_is_counted_once() -> None:
    tied = config("gla", tie_word_embeddings=True)
    assert parameter_count(config("gla")) - parameter_count(tied) == VOCAB * 16


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: config("glaa"), "gla"),
        (lambda: config("gla", hiden_size=3), "no field 'hiden_size'"),
        (lambda: config({"a": "gla"}, layers=["b"]), "not among: a"),
        (lambda: config({"a": 3}), "zoo name"),
        (lambda: config("gla", engine="kernel"), "cannot run"),
        (lambda: RecollectConfig(schema=9), "schema 9"),
        (lambda: RecollectConfig(recipes={"a": {"recipee": {}}}), "'options'"),
        (lambda: RecollectForCausalLM(RecollectConfig()), "no recipes"),
        (lambda: model("gla", num_attention_heads=3), "multiple of num_attention_heads = 3"),
    ],
)
def test_bad_configurations_are_one_sentence(make: object, says: str) -> None:
    with pytest.raises(rc.RecipeError, match=says):
        make()  # type: ignore[operator]


def test_bad_inputs_are_one_sentence() -> None:
    net, ids = model("gla"), text()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        net()
    with pytest.raises(ValueError, match=r"shape \[2, 11\], not \[2, 5\]"):
        net(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="one per logit"):
        net(ids, labels=ids[:, 1:])
    with pytest.raises(ValueError, match=r"labels must be token ids in int64, not torch.float32"):
        net(ids, labels=ids.float())


def test_invalid_token_ids_give_one_sentence() -> None:
    net, ids = model("gla"), text()

    def as_ids(x: Tensor) -> object:
        return net.generate(x, max_new_tokens=2)

    for row, column, token in ((1, 4, VOCAB), (0, 7, -1)):
        odd = ids.clone()
        odd[row, column] = token
        message = rf"token {token} at row {row}, column {column}, and .* is 0 to {VOCAB - 1}: use"
        for call in (net, net.model, as_ids):
            with pytest.raises(ValueError, match=message):
                call(odd)
    calls = (net, lambda x: net(x, labels=x, return_dict=True), net.model, as_ids)
    for call in (*calls, lambda x: rc.lm.CachedPrompt.prefill(net, x)):
        with pytest.raises(ValueError, match=r"shape \[B, T\], not \[11\]: .* input_ids\[None\]"):
            call(ids[0])
        with pytest.raises(ValueError, match=r"int64, not torch.float32: .*inputs_embeds"):
            call(ids.float())
        with pytest.raises(ValueError, match=r"must be a tensor .*, not list"):
            call(ids.tolist())
    assert torch.equal(net(ids.int()).logits, net(ids).logits)
    for options in ({}, {"max_new_tokens": 2}):
        with pytest.raises(
            ValueError, match=r"no tokens .*one at least: begin with .*bos_token_id"
        ):
            net.generate(input_ids=ids[:, :0], **options)


def test_error_without_transformers_names_the_package() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import recollect\n"
        "try: recollect.lm\n"
        "except ImportError as error: print(error)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert 'pip install -e ".[lm]" in its checkout' in output.stdout
