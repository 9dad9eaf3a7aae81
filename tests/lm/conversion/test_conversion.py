"""Converters of published models: equal outputs, bit-exact round trips, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lm.conversion.published import FAMILIES, forward, make, save

import recollect as rc
import recollect.lm
from recollect.lm.conversion.fla_backbone import factor_of, size_per_head

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in FAMILIES),
    ("gla", {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "expand_k": 1.0}),
    ("gla", {"use_output_gate": False, "tie_word_embeddings": True}),
    ("delta_net", {"use_gate": True, "allow_neg_eigval": True, "expand_k": 0.5, "expand_v": 2}),
    ("delta_net", {"use_short_conv": False}),
    ("gated_deltanet", {"allow_neg_eigval": True, "output_gate_activation": "sigmoid"}),
    ("gated_deltanet", {"use_gate": False, "use_short_conv": False, "expand_v": 1.0}),
    ("kda", {"allow_neg_eigval": True, "use_short_conv": False, "expand_v": 0.5}),
    ("gated_deltanet", {"num_v_heads": 4, "expand_v": 1.0}),
    ("kda", {"num_heads": 2, "num_v_heads": 4, "head_dim": 6}),
    ("hgrn2", {"use_lower_bound": False, "expand_ratio": 12, "num_heads": 4}),
    ("hgrn2", {"num_hidden_layers": 3}),
    ("retnet", {"use_output_gate": False, "expand_k": 0.5, "expand_v": 1.0}),
]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: x
        for path in sorted(folder.glob("*.safetensors"))
        for name, x in load_file(path).items()
    }


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_outputs_and_round_trip(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    config, state = make(model_type, **changes)
    source = save(tmp_path / "published", config, state)
    rc.lm.convert(source, tmp_path / "ours")
    model = rc.lm.RecollectForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(config["vocab_size"], (21,), generator=torch.Generator().manual_seed(1))
    expected = forward(ids, state, config, FAMILIES[model_type][1])
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        steps, cache = [], None
        for part in (ids[:9], ids[9:10], ids[10:]):
            outputs = model(part[None], cache=cache, use_cache=True)
            cache = rc.lm.cache_of(outputs)
            steps.append(outputs.logits[0])
        assert (torch.cat(steps) - expected).abs().max() <= 1e-5 * expected.abs().max()
        exact = model.double()(ids[None]).logits[0]  # constants are those of the layout, too
        assert (exact - expected).abs().max() <= 1e-9 * expected.abs().max()

    back = rc.lm.convert(tmp_path / "ours", tmp_path / "back", to=model_type)
    result = tensors(back)
    assert result.keys() == state.keys()
    for name, x in state.items():
        assert torch.equal(x, result[name]), name
    saved = json.loads((back / "config.json").read_text())
    assert {**saved, **config} == saved


def published(folder: Path, model_type: str = "delta_net", **changes: Any) -> Path:
    return save(folder, *make(model_type, **changes))


def test_shards_are_read_and_written_one_at_a_time(tmp_path: Path) -> None:
    config, state = make("delta_net")
    source = save(tmp_path / "published", config, state)
    ours = rc.lm.convert(source, tmp_path / "ours", max_shard_size=20_000)
    files = sorted(path.name for path in ours.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    rc.lm.RecollectForCausalLM.from_pretrained(ours)
    back = rc.lm.convert(ours, tmp_path / "back", to="delta_net", max_shard_size=30_000)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
    result = tensors(back)
    assert all(torch.equal(x, result[name]) for name, x in state.items())


def test_dtype_per_tensor_is_preserved(tmp_path: Path) -> None:
    config, state = make("delta_net")
    state = {name: x if "norm" in name else x.bfloat16() for name, x in state.items()}
    ours = rc.lm.convert(save(tmp_path / "published", config, state), tmp_path / "ours")
    assert json.loads((ours / "config.json").read_text())["dtype"] == "bfloat16"
    assert rc.lm.RecollectForCausalLM.from_pretrained(ours).dtype == torch.bfloat16
    result = tensors(rc.lm.convert(ours, tmp_path / "back", to="delta_net"))
    assert all(torch.equal(x, result[n]) and x.dtype == result[n].dtype for n, x in state.items())


def test_dtype_of_a_model_is_that_of_most_numbers(tmp_path: Path) -> None:
    config, state = make("delta_net")
    large = {name for name, x in state.items() if "mlp" in name or "embed" in name}
    state = {n: x.double() if n in large else x.bfloat16() for n, x in state.items()}
    counts = {x.dtype: 0 for x in state.values()}
    for x in state.values():
        counts[x.dtype] += x.numel()
    assert counts[torch.bfloat16] > counts[torch.float64] > counts[torch.bfloat16] / 4
    ours = rc.lm.convert(save(tmp_path / "published", config, state), tmp_path / "ours")
    assert json.loads((ours / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_norm_that_is_not_fused_has_another_name_only(tmp_path: Path) -> None:
    config, state = make("gla", fuse_norm=False)
    separate = rc.lm.convert(save(tmp_path / "a", config, state), tmp_path / "ours_a")
    renamed = {name.replace(".g_norm.", ".g_norm_swish_gate."): x for name, x in state.items()}
    fused = rc.lm.convert(
        save(tmp_path / "b", {**config, "fuse_norm": True}, renamed), tmp_path / "ours_b"
    )
    a, b = tensors(separate), tensors(fused)
    assert a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("model_type", ["delta_net", "recollect"])
def test_the_repeated_head_of_a_tied_model(tmp_path: Path, model_type: str) -> None:
    source, to = published(tmp_path / "in", tie_word_embeddings=True), None
    embedding = "model.embeddings.weight"
    if model_type == "recollect":
        source, to = rc.lm.convert(source, tmp_path / "ours"), "delta_net"
        embedding = "model.embed_tokens.weight"
    state, file = tensors(source), source / "model.safetensors"
    head = state[embedding].clone()
    save_file({**state, "lm_head.weight": head}, file)
    assert "lm_head.weight" not in tensors(rc.lm.convert(source, tmp_path / "equal", to=to))
    head[3, 1] += 1
    for changed in (head, state[embedding].double()):
        save_file({**state, "lm_head.weight": changed}, file)
        with pytest.raises(rc.lm.CheckpointError, match="set tie_word_embeddings to false"):
            rc.lm.convert(source, tmp_path / "different", to=to)
    assert not (tmp_path / "different").exists()


def test_folders_next_to_the_result_are_unchanged(tmp_path: Path) -> None:
    source, other = published(tmp_path / "in"), tmp_path / ".ours.saving"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    ours = rc.lm.convert(source, tmp_path / "ours")
    assert (other / "notes.txt").read_text() == "mine"
    assert ours.stat().st_mode == other.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"in", "ours", ".ours.saving"}


def test_tokenizer_is_copied(tmp_path: Path) -> None:
    source = published(tmp_path / "published")
    files = ["tokenizer.json", "spiece.model", "tekken.json", "chat_template.json"]
    files += ["additional_chat_templates/tools.jinja"]
    (source / "additional_chat_templates").mkdir()
    for file in files:
        (source / file).write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')
    (source / "modeling_secret.py").write_text("raise RuntimeError")
    ours = rc.lm.convert(source, tmp_path / "ours")
    names = {path.name for path in ours.iterdir()}
    assert {"generation_config.json", "README.md", "manifest.json"} <= names
    assert all((ours / file).read_text() == "{}" for file in files)
    assert "modeling_secret.py" not in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn": {"layers": [0], "num_heads": 2}}, "the option 'attn' of delta_net must be None"),
        ({"qk_norm": "sum"}, "the option 'qk_norm' of delta_net must be 'l2' .* not 'sum'"),
        ({"use_moon": True}, "the option 'use_moon' is unknown to the converter of delta_net"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised"),
        ({"model_type": "llama"}, "no converter for models of type 'llama': the known ones"),
        ({"model_type": ["gla"]}, r"no converter for models of type \['gla'\]: the known ones"),
        ({"expand_k": 0.32}, "hidden_size · expand_k is 15.36, and num_heads, 2, must divide"),
        ({"expand_k": 1e308}, "hidden_size · expand_k is inf, and num_heads, 2, must divide"),
        ({"expand_k": 1e300}, "cannot be converted: LayerOptions"),
        ({"hidden_size": 10**400}, "too large"),
        ({"num_heads": "two"}, "'num_heads' of delta_net must be an integer above 0, not 'two'"),
        ({"num_heads": 0}, "'num_heads' of delta_net must be an integer above 0, not 0"),
        ({"norm_eps": None}, "'norm_eps' of delta_net must be a number above 0, not None"),
        ({"use_gate": 1}, "'use_gate' of delta_net must be true or false, not 1"),
        ({"eos_token_id": 40}, "eos_token_id"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config, state = make("delta_net")
    source = save(tmp_path / "published", {**config, **changes}, state)
    with pytest.raises(rc.lm.CheckpointError, match=message) as caught:
        rc.lm.convert(source, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published"]


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gla", {"num_heads": 4, "num_kv_heads": 3}, "must be a multiple of .* = 3"),
        ("hgrn2", {"num_heads": 5}, "num_heads is 5, and hidden_size / expand_ratio is 3"),
        ("gated_deltanet", {"expand_v": 1e308}, "head_dim · expand_v is inf"),
        ("kda", {"expand_v": 0.7501}, "head_dim · expand_v is .*a whole number"),
    ],
)
def test_sizes_that_do_not_fit(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    config, state = make(model_type)
    source = save(tmp_path / "published", {**config, **changes}, state)
    with pytest.raises(rc.lm.CheckpointError, match=message):
        rc.lm.convert(source, tmp_path / "ours")


def test_published_factors_of_sizes_give_the_sizes() -> None:
    """The published layers take the integer part of a product with a factor."""
    for n in range(1, 300):
        for m in range(1, 2 * n, 7):
            x = factor_of((n, m), (12 * n, 12 * m))
            assert (int(n * x), int(12 * n * x)) == (m, 12 * m)
            assert abs(x - m / n) <= 4e-16 * x
    rounded_down = {(n, m) for n in range(1, 300) for m in range(1, 2 * n) if int(n * (m / n)) < m}
    n, m = min(rounded_down)  # such pairs exist
    options = {"hidden_size": n, "expand_v": factor_of((n, m)), "num_heads": 1}
    assert size_per_head(options, "expand_v") == m
    with pytest.raises(ValueError, match="must divide its integer part"):
        size_per_head({**options, "expand_v": 0.999 / n}, "expand_v")


def test_quantized_models_are_refused(tmp_path: Path) -> None:
    ours = rc.lm.convert(published(tmp_path / "published"), tmp_path / "ours")
    saved = json.loads((ours / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "torchao"}
    (ours / "config.json").write_text(json.dumps(saved))
    with pytest.raises(rc.lm.CheckpointError, match="the weights are quantised"):
        rc.lm.convert(ours, tmp_path / "back", to="delta_net")
    config, state = make("delta_net")
    state = {name: x.to(torch.float8_e4m3fn) for name, x in state.items()}
    source = save(tmp_path / "f8", {**config, "quantization_config": None}, state)
    message = "has type F8_E4M3, which is none of F64, F32, F16, BF16: save it in one of them"
    with pytest.raises(rc.lm.CheckpointError, match=message):
        rc.lm.convert(source, tmp_path / "again")


@pytest.mark.parametrize("size", ["5GB", None, 0, -5, True])
def test_sizes_of_files_that_do_not_fit(tmp_path: Path, size: Any) -> None:
    source = published(tmp_path / "published")
    with pytest.raises(rc.lm.CheckpointError, match="max_shard_size must be a number of bytes"):
        rc.lm.convert(source, tmp_path / "ours", max_shard_size=size)


@pytest.mark.parametrize("out", ["", ".", "new/.."])
def test_results_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    source = published(tmp_path / "published")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(rc.lm.CheckpointError, match="name a new folder"):
        rc.lm.convert(source, out)
    assert not any((tmp_path / "empty").iterdir())


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    config, state = make("delta_net")
    name = "model.layers.1.attn.b_proj.weight"
    wrong = {
        "lacks the weight 'model.layers.1.attn.b_proj.weight'": {
            other: x for other, x in state.items() if other != name
        },
        "has the weight 'model.layers.1.attn.b_proj.bias'": {
            **state,
            "model.layers.1.attn.b_proj.bias": torch.zeros(2),
        },
        r"has shape \[3, 48\], and config.json requires \[2, 48\]": {
            **state,
            name: torch.zeros(3, 48),
        },
        "in the types BF16 and F32, and they become one tensor": {
            **state,
            "model.layers.0.attn.k_proj.weight": torch.zeros(48, 48).bfloat16(),
        },
    }
    for index, (message, tensors_) in enumerate(wrong.items()):
        source = save(tmp_path / str(index), config, tensors_)
        with pytest.raises(rc.lm.CheckpointError, match=message):
            rc.lm.convert(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    source = published(tmp_path / "published")
    with pytest.raises(rc.lm.CheckpointError, match="there is no folder"):
        rc.lm.convert(tmp_path / "nowhere", tmp_path / "ours")
    with pytest.raises(rc.lm.CheckpointError, match="exists already: name a new folder"):
        rc.lm.convert(source, source)
    with pytest.raises(rc.lm.CheckpointError, match="leave out the layout"):
        rc.lm.convert(source, tmp_path / "ours", to="gla")
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    with pytest.raises(rc.lm.CheckpointError, match=r"has shards and no model\.safetensors\.index"):
        rc.lm.convert(source, tmp_path / "ours")
    (source / "model-00001-of-00002.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(rc.lm.CheckpointError, match=r"has no model.safetensors"):
        rc.lm.convert(source, tmp_path / "ours")


def test_weights_of_nan_leave_no_result(tmp_path: Path) -> None:
    config, state = make("delta_net")
    name = "model.layers.1.attn.b_proj.weight"
    source = save(tmp_path / "published", config, {**state, name: state[name] / 0})
    with pytest.raises(rc.lm.CheckpointError, match=f"'{name}' holds NaN or infinity"):
        rc.lm.convert(source, tmp_path / "new" / "folder" / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_a_configuration_without_a_type(tmp_path: Path) -> None:
    config, state = make("delta_net")
    del config["model_type"]
    source = save(tmp_path / "published", config, state)
    with pytest.raises(rc.lm.CheckpointError, match="has no model_type, which names the layout"):
        rc.lm.convert(source, tmp_path / "ours")
    source = save(tmp_path / "llama", {"model_type": "llama"}, state)
    with pytest.raises(rc.lm.CheckpointError, match="no converter for models of type 'llama'"):
        rc.lm.convert(source, tmp_path / "ours", to="gla")


def test_unsupported_models(tmp_path: Path) -> None:
    sizes = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = rc.lm.RecollectConfig.from_recipes("delta_net", **sizes)
    rc.lm.RecollectForCausalLM(config).save_pretrained(tmp_path / "ours")
    with pytest.raises(rc.lm.CheckpointError, match="name the layout to convert to, one of"):
        rc.lm.convert(tmp_path / "ours", tmp_path / "out")
    message = r"layers\[0\]\.options\.qk_norm_eps is 1e-12, and a model of type delta_net has 1e-06"
    with pytest.raises(rc.lm.CheckpointError, match=message):
        rc.lm.convert(tmp_path / "ours", tmp_path / "out", to="delta_net")
    with pytest.raises(rc.lm.CheckpointError, match=r"is .*and a model of type gla has"):
        rc.lm.convert(tmp_path / "ours", tmp_path / "out", to="gla")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_new_model_with_a_published_layout_trains_and_converts(
    tmp_path: Path, model_type: str
) -> None:
    options = {**make(model_type)[0]}
    del options["model_type"]
    model = rc.lm.RecollectForCausalLM(rc.lm.published_config(model_type, **options))
    ids = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
    model.save_pretrained(tmp_path / "ours")
    state = tensors(rc.lm.convert(tmp_path / "ours", tmp_path / "out", to=model_type))
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = forward(ids[0], state, saved, FAMILIES[model_type][1])
    with torch.no_grad():
        logits = model.eval()(ids).logits[0]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_silu_and_swish_are_one_activation() -> None:
    sizes = {"num_hidden_layers": 1, "vocab_size": 19}
    for model_type, name in (("gla", "silu"), ("qwen3_5_text", "swish")):
        config = rc.lm.published_config(model_type, **sizes, hidden_act=name)
        assert config.to_dict() == rc.lm.published_config(model_type, **sizes).to_dict()
    with pytest.raises(ValueError, match="'hidden_act' of gla must be 'swish'"):
        rc.lm.published_config("gla", hidden_act="gelu")


def test_published_config_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"converter of gla \(did you mean 'hidden_size"):
        rc.lm.published_config("gla", hidden=64)
    with pytest.raises(ValueError, match="there is no layout 'glaa'"):
        rc.lm.published_config("glaa")
    with pytest.raises(ValueError, match="the option 'width' is unknown"):
        rc.lm.published_config("gla", width=3)
