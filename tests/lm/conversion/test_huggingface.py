"""Converters of models of transformers, whose classes give the expected logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.lm.adoption import models
from torch import Tensor
from torch.nn.functional import silu, softplus

import recollect as rc
import recollect.lm

DELTA, ATTENTION = "linear_attention", "full_attention"
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mamba2", {}),
    ("mamba2", {"n_groups": 1, "use_conv_bias": False, "tie_word_embeddings": True}),
    ("mamba2", {"n_groups": 8, "layer_norm_epsilon": 1e-3, "conv_kernel": 2}),
    ("qwen3_5_text", {}),
    (
        "qwen3_5_text",
        {
            "layer_types": [ATTENTION, DELTA, DELTA],
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 6,
            "rms_norm_eps": 1e-4,
            "head_dim": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
    ("qwen3_5_text", {"layer_types": [DELTA] * 3, "linear_num_key_heads": 1}),
    ("qwen3_5_text", {"layer_types": [ATTENTION] * 3}),
]


def make_model(model_type: str, **changes: Any) -> Any:
    if model_type == "mamba2":  # it has no such options
        changes = {"intermediate_size": None, "num_attention_heads": None, **changes}
    return models.make_model(model_type, **changes)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(1))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def convert(model: Any, folder: Path) -> tuple[Any, Path]:
    model.save_pretrained(folder / "published")
    ours = rc.lm.convert(folder / "published", folder / "ours")
    return rc.lm.RecollectForCausalLM.from_pretrained(ours).eval(), ours


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_logits_and_round_trip(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    model = make_model(model_type, **changes)
    converted, ours = convert(model, tmp_path)
    ids = tokens(2, 27)
    expected = model(ids, use_cache=False).logits
    assert error(converted(ids).logits, expected) <= 1e-5

    back = rc.lm.convert(ours, tmp_path / "back", to=model_type)
    state, result = (load_file(x / "model.safetensors") for x in (tmp_path / "published", back))
    assert state.keys() == result.keys()
    assert all(torch.equal(x, result[name]) for name, x in state.items())
    loaded = type(model).from_pretrained(back).eval()
    assert error(loaded(ids, use_cache=False).logits, expected) <= 1e-6  # other chunk sizes


@torch.no_grad()
def test_the_text_model_of_a_model_of_images(tmp_path: Path) -> None:
    """A text model from a model of images is saved with other names."""
    text = make_model("qwen3_5_text")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = transformers.Qwen3_5Config(
        text_config=text.config.to_dict(), vision_config={**vision, "out_hidden_size": 32}
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "images")
    with pytest.raises(rc.lm.CheckpointError, match="they have images, too; save the text model"):
        rc.lm.convert(tmp_path / "images", tmp_path / "ours")
    model = type(text).from_pretrained(tmp_path / "images").eval()
    converted, ours = convert(model, tmp_path)
    state = load_file(tmp_path / "published" / "model.safetensors")
    assert any(name.startswith("model.language_model.") for name in state)
    ids = tokens(1, 9)
    assert error(converted(ids).logits, model(ids).logits) <= 1e-5
    back = rc.lm.convert(ours, tmp_path / "back", to="qwen3_5_text")
    result = load_file(back / "model.safetensors")
    names = {name: name.replace("model.language_model.", "model.") for name in state}
    assert {*names.values()} == result.keys()
    assert all(torch.equal(x, result[names[name]]) for name, x in state.items())


def test_tensors_that_transformers_ignores(tmp_path: Path) -> None:
    """Heads of several tokens are left out, and other unknown tensors are refused."""
    make_model("qwen3_5_text").save_pretrained(tmp_path / "published")
    file = tmp_path / "published" / "model.safetensors"
    state = load_file(file)
    save_file({**state, "mtp.fc.weight": torch.zeros(2, 2)}, file)
    ours = rc.lm.convert(tmp_path / "published", tmp_path / "ours")
    back = rc.lm.convert(ours, tmp_path / "back", to="qwen3_5_text")
    assert load_file(back / "model.safetensors").keys() == state.keys()
    save_file({**state, "model.mtp.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(rc.lm.CheckpointError, match=r"has the weight 'model\.mtp\.weight'"):
        rc.lm.convert(tmp_path / "published", tmp_path / "again")


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_5_text"])
def test_decoding_padding_and_generation(tmp_path: Path, model_type: str) -> None:
    model = make_model(model_type)
    converted, _ = convert(model, tmp_path)
    ids = tokens(2, 12)
    expected = model(ids).logits
    outputs = converted(ids[:, :7], use_cache=True)
    logits = [outputs.logits]
    for t in range(7, 12):
        outputs = converted(ids[:, t : t + 1], cache=outputs.cache, use_cache=True)
        logits.append(outputs.logits)
    assert error(torch.cat(logits, 1), expected) <= 1e-5
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    padded = converted(ids, attention_mask=mask).logits
    assert error(padded[0, 5:], model(ids[:1, 5:]).logits[0]) <= 1e-5
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(converted.generate(ids, **settings), model.generate(ids, **settings))


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_5_text"])
def test_gradients_equal_those_of_the_original(tmp_path: Path, model_type: str) -> None:
    model = make_model(model_type)
    converted, _ = convert(model, tmp_path)
    ids = tokens(2, 15)
    for one in (model, converted):
        one(ids, labels=ids).loss.backward()
    pairs = {
        "mamba2": [
            ("backbone.layers.0.mixer.A_log", "layer.params.decay_scale.bias", 1),
            ("backbone.layers.0.mixer.conv1d.bias", "layer.conv.bias", None),
            ("backbone.layers.0.mixer.D", "layer.skip", 1),
            ("backbone.layers.0.mixer.norm.weight", "layer.norm.weight", 1),
        ],
        "qwen3_5_text": [
            ("model.layers.0.linear_attn.dt_bias", "layer.gates.log_decay.bias", -1),
            ("model.layers.0.linear_attn.in_proj_qkv.weight", "layer.qkv.weight", 1),
            ("model.layers.0.input_layernorm.weight", "memory_norm.weight", 1),
        ],
    }[model_type]
    theirs, ours = dict(model.named_parameters()), dict(converted.named_parameters())
    for name, our_name, sign in pairs:
        expected, result = theirs[name].grad, ours[f"model.blocks.0.{our_name}"].grad
        assert expected is not None
        if sign is None:  # v, k, q there and q, k, v here
            v, k, q = expected.split([64, 16, 16])
            expected, sign = torch.cat([q, k, v]), 1
        assert error(result.view_as(expected), sign * expected) <= 1e-4, name


def mamba2_layer(x: Tensor, w: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Mamba-2 for one sequence ``[T, D]``, one token, head and group after another."""
    heads, P, N, groups = (config[n] for n in ("num_heads", "head_dim", "state_size", "n_groups"))
    width, T = heads * P, x.shape[0]
    gate, u, step = (x @ w["in_proj.weight"].T).split([width, width + 2 * groups * N, heads], -1)
    conv = w["conv1d.weight"][:, 0]
    rows = []
    for t in range(T):
        taps = [conv[:, -1 - j] * u[t - j] for j in range(conv.shape[1]) if t >= j]
        rows.append(silu(torch.stack(taps).sum(0) + w["conv1d.bias"]))
    v, B, C = torch.stack(rows).split([width, groups * N, groups * N], -1)
    step = softplus(step + w["dt_bias"])
    D = w["D"].view(heads, -1)
    outputs = []
    for h in range(heads):
        g = h * groups // heads
        state, head = torch.zeros(P, N, dtype=x.dtype), slice(h * P, (h + 1) * P)
        values = []
        for t in range(T):
            key, query = B[t, g * N : (g + 1) * N], C[t, g * N : (g + 1) * N]
            decay = (-w["A_log"][h].exp() * step[t, h]).exp()
            state = decay * state + step[t, h] * torch.outer(v[t, head], key)
            values.append(state @ query + D[h] * v[t, head])
        outputs.append(torch.stack(values))
    y = torch.cat(outputs, -1) * silu(gate)
    parts = []
    for g, part in enumerate(y.split(width // groups, -1)):
        weight = w["norm.weight"].split(width // groups)[g]
        parts.append(weight * part / (part.square().mean(-1, keepdim=True) + config["eps"]).sqrt())
    return torch.cat(parts, -1) @ w["out_proj.weight"].T


def test_mamba2_of_flash_linear_attention_with_a_skip_per_channel(tmp_path: Path) -> None:
    """Its options have other names, and outputs equal those of a loop in float64."""
    generator = torch.Generator().manual_seed(0)
    heads, P, N, groups, D, vocab = 4, 6, 5, 2, 12, 19
    width, channels = heads * P, heads * P + 2 * groups * N
    shapes = {
        "in_proj.weight": (width + channels + heads, D),
        "conv1d.weight": (channels, 1, 4),
        "conv1d.bias": (channels,),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (width,),
        "norm.weight": (width,),
        "out_proj.weight": (D, width),
    }
    state = {
        f"backbone.layers.{i}.mixer.{name}": torch.randn(shape, generator=generator) * 0.5
        for i in range(2)
        for name, shape in shapes.items()
    }
    state |= {
        f"backbone.layers.{i}.norm.weight": torch.rand(D, generator=generator) for i in (0, 1)
    }
    state["backbone.norm_f.weight"] = torch.rand(D, generator=generator)
    state["backbone.embeddings.weight"] = torch.randn(vocab, D, generator=generator)
    state["lm_head.weight"] = torch.randn(vocab, D, generator=generator)
    saved = {
        "model_type": "mamba2",
        "hidden_size": D,
        "num_hidden_layers": 2,
        "vocab_size": vocab,
        "head_dim": P,
        "state_size": N,
        "n_groups": groups,
        "norm_eps": 3e-3,
        "dt_limit": [0.0, float("inf")],
        "D_has_hdim": True,
        "rmsnorm": True,
        "norm_before_gate": False,
        "fuse_norm": True,
        "pad_token_id": 0,
    }
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**saved, "dt_limit": [0.0, {"__float__": "Infinity"}]})
    )
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    ours = rc.lm.convert(folder, tmp_path / "ours")
    model = rc.lm.RecollectForCausalLM.from_pretrained(ours).double().eval()

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 3e-3).sqrt()

    weights = {name: x.double() for name, x in state.items()}
    ids = torch.randint(vocab, (17,), generator=generator)
    x = weights["backbone.embeddings.weight"][ids]
    config = {**saved, "num_heads": heads, "eps": 3e-3}
    for i in range(2):
        prefix = f"backbone.layers.{i}."
        mixer = {
            name.removeprefix(f"{prefix}mixer."): w
            for name, w in weights.items()
            if name.startswith(f"{prefix}mixer.")
        }
        x = x + mamba2_layer(rms(x, weights[f"{prefix}norm.weight"]), mixer, config)
    expected = rms(x, weights["backbone.norm_f.weight"]) @ weights["lm_head.weight"].T
    with torch.no_grad():
        assert error(model(ids[None]).logits[0], expected) <= 1e-9

    back = rc.lm.convert(ours, tmp_path / "back", to="mamba2")
    result = load_file(back / "model.safetensors")
    assert all(torch.equal(x, result[name]) for name, x in state.items())
    written_config = json.loads((back / "config.json").read_text())
    assert written_config["norm_eps"] == written_config["layer_norm_epsilon"] == 3e-3
    assert written_config["D_has_hdim"] is True
    assert "Infinity]" not in (back / "config.json").read_text()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba2", {"time_step_limit": [0.001, 0.1]}, "'time_step_limit' of mamba2 must be"),
        ("mamba2", {"model_type": "rwkv7"}, "'rwkv7' cannot be converted: their layers mix values"),
        ("mamba2", {"use_bias": True}, "'use_bias' of mamba2 must be False"),
        ("mamba2", {"norm_eps": 1e-3}, "'norm_eps' and 'layer_norm_epsilon' are one"),
        (
            "mamba2",
            {"num_heads": 6},
            "expand · hidden_size is 64, and num_heads · head_dim is 6 · 8",
        ),
        ("mamba2", {"n_groups": 3}, "n_groups is 3, and it must divide 8 heads"),
        (
            "qwen3_5_text",
            {"attention_bias": True},
            "'attention_bias' of qwen3_5_text must be False",
        ),
        ("qwen3_5_text", {"layer_types": ["conv"] * 3}, "layer_types must have 3 names"),
        ("qwen3_5_text", {"layer_types": [[1], 2, 3]}, "layer_types must have 3 names"),
        (
            "qwen3_5_text",
            {"layer_types": None, "full_attention_interval": 0},
            "'full_attention_interval' of qwen3_5_text must be an integer above 0, not 0",
        ),
        (  # before a name is made for every layer
            "qwen3_5_text",
            {"layer_types": None, "num_hidden_layers": 10**6},
            "converted: num_hidden_layers must be a whole number from 1 to 10000, not 1000000",
        ),
        *(
            (
                "qwen3_5_text",
                {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, name: value}},
                f"{name} of rope_parameters must be a number above 0, not {value!r}",
            )
            for name, value in (
                ("partial_rotary_factor", None),
                ("partial_rotary_factor", "x"),
                ("rope_theta", None),
            )
        ),
        ("qwen3_5_text", {"layer_types": 3}, "'layer_types' of qwen3_5_text must be a list, not 3"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_key_heads, 3, must divide it"),
        (
            "qwen3_5_text",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "must have the rope_type 'default'",
        ),
        (
            "qwen3_5_text",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.125}},
            "partial_rotary_factor is 1, and rotations need an even number",
        ),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    make_model(model_type).save_pretrained(tmp_path / "published")
    path = tmp_path / "published" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(rc.lm.CheckpointError, match=message) as caught:
        rc.lm.convert(tmp_path / "published", tmp_path / "ours")
    assert "\n" not in str(caught.value)


def test_unsupported_models(tmp_path: Path) -> None:
    sizes = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for system, to in (
        ("mamba2", "mamba2"),
        ("gated_delta_net", "qwen3_5_text"),
        ("softmax_attention", "qwen3_5_text"),
        ("titans", "mamba2"),
        ("samba", "qwen3_5_text"),
    ):
        config = rc.lm.RecollectConfig.from_recipes(system, **sizes)
        rc.lm.RecollectForCausalLM(config).save_pretrained(tmp_path / system)
        with pytest.raises(rc.lm.CheckpointError, match=f"a model of type {to} has"):
            rc.lm.convert(tmp_path / system, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_5_text"])
def test_a_new_model_with_a_published_layout_trains_and_converts(
    tmp_path: Path, model_type: str
) -> None:
    original = make_model(model_type)
    original.save_pretrained(tmp_path / "published")
    options = json.loads((tmp_path / "published" / "config.json").read_text())
    del options["model_type"]
    model = rc.lm.RecollectForCausalLM(rc.lm.published_config(model_type, **options))
    ids = tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
    model.save_pretrained(tmp_path / "ours")
    back = rc.lm.convert(tmp_path / "ours", tmp_path / "back", to=model_type)
    loaded = type(original).from_pretrained(back).eval()
    with torch.no_grad():
        assert error(model.eval()(ids).logits, loaded(ids).logits) <= 1e-5
