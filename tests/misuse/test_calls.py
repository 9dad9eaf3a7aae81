"""Calls with tensors, states, names and modules that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.misuse.sentences import refuses
from torch import Tensor

import recollect as rc

R = rc.Recipe()
LAYER = rc.MemoryLayer(8, 2, R)


def _sizes() -> rc.experiments.Sizes:
    return rc.experiments.Sizes(
        width=16, depth=1, heads=1, length=48, schedule=rc.experiments.Schedule(steps=1, batch=1)
    )


def _q() -> Tensor:
    return torch.zeros(1, 3, 1, 4)


def _recall(**changed: Any) -> object:
    """Make a call that is valid except for the changes."""
    arguments: dict[str, Any] = {
        "q": _q(),
        "k": _q(),
        "v": _q(),
        "gates": {"lr": torch.ones(1, 3, 1)},
    }
    arguments |= changed
    return rc.recall(
        R,
        arguments.pop("q"),
        arguments.pop("k"),
        arguments.pop("v"),
        arguments.pop("gates"),
        **arguments,
    )


RECALLS: dict[str, tuple[dict[str, Any], str]] = {
    **{f"sparse {x}": ({x: _q().to_sparse()}, f"{x} must be a dense tensor") for x in "qkv"},
    **{f"complex {x}": ({x: _q().to(torch.complex64)}, "floating point") for x in "q"},
    **{f"whole {x}": ({x: _q().long()}, f"{x} must be floating point") for x in "qkv"},
    **{f"list {x}": ({x: _q().tolist()}, f"{x} must be a tensor") for x in "qkv"},
    **{f"None {x}": ({x: None}, f"{x} must be a tensor") for x in "qkv"},
    **{f"numpy {x}": ({x: _q().numpy()}, f"{x} must be a tensor") for x in "qkv"},
    **{f"half {x}": ({x: _q().half()}, "one dtype") for x in "kv"},
    **{f"flat {x}": ({x: _q()[0]}, f"{x} must have shape") for x in "qkv"},
    **{f"meta {x}": ({x: _q().to("meta")}, "one device") for x in "kv"},
    **{f"nan {x}": ({x: _q() + torch.nan}, f"{x} has a NaN") for x in "qkv"},
    **{f"inf {x}": ({x: _q() + torch.inf}, f"{x} has an infinity") for x in "qkv"},
    "gates in a list": ({"gates": [1]}, "gates must map names to tensors"),
    "gates in a tensor": ({"gates": _q()}, "gates must map names to tensors"),
    "no gates": ({"gates": None}, "gate 'lr' is missing"),
    "a sparse gate": ({"gates": {"lr": torch.ones(1, 3, 1).to_sparse()}}, "dense"),
    "a gate by another name": ({"gates": {"rate": torch.ones(1, 3, 1)}}, "'lr' is missing"),
    "one gate more": (
        {"gates": {"lr": torch.ones(1, 3, 1), "beta": torch.ones(1, 3, 1)}},
        "'beta' is unknown",
    ),
    "a gate below": ({"gates": {"lr": -torch.ones(1, 3, 1)}}, ">= 0"),
    "a gate of nan": ({"gates": {"lr": torch.full((1, 3, 1), torch.nan)}}, "NaN"),
    "a gate that is a number": ({"gates": {"lr": 0.5}}, "floating-point tensor"),
    "a gate that is None": ({"gates": {"lr": None}}, "floating-point tensor"),
    "params in a list": ({"params": [1]}, "params must map names to tensors"),
    "a param nobody asked for": ({"params": {"lr": _q()}}, "'lr' is unknown"),
    "init in words": ({"initial_memory": "x"}, "initial_memory must be a tensor"),
    "init in numbers": ({"initial_memory": [1.0]}, "initial_memory must be a tensor"),
    "init of another shape": ({"initial_memory": torch.zeros(1, 3, 4)}, "must have shape"),
    "init of nan": ({"initial_memory": torch.full((1, 4, 4), torch.nan)}, "NaN"),
    "a state in words": ({"state": "x"}, "a state that recall returned"),
    "a state in tensors": ({"state": _q()}, "a state that recall returned"),
    "a sparse mask": ({"attention_mask": torch.ones(1, 3).to_sparse()}, "dense"),
    "a long mask": ({"attention_mask": torch.ones(1, 4)}, "must have shape [1, 3]"),
    "a mask of halves": ({"attention_mask": torch.full((1, 3), 0.5)}, "must be 1"),
    "a mask in a list": ({"attention_mask": [1, 1, 1]}, "must have shape"),
    "borders in a list": ({"cu_seqlens": [0, 3]}, "cu_seqlens must be a tensor"),
    "borders too short": ({"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens must rise"),
    "borders that fall": ({"cu_seqlens": torch.tensor([0, 2, 1, 3])}, "cu_seqlens must rise"),
    "causal in words": ({"causal": "yes"}, "causal must be True or False, not 'yes'"),
    "causal as a number": ({"causal": 1}, "causal must be True or False, not 1"),
    "causal None": ({"causal": None}, "causal must be True or False, not None"),
    "a state in words asked": (
        {"output_final_state": "no"},
        "output_final_state must be True or False",
    ),
    "no method": ({"engine": None}, "engine=None is unknown"),
    "another method": ({"engine": "fast"}, "engine='fast' is unknown"),
    "a removed engine": ({"engine": "fused"}, "engine='fused' is unknown"),
    "a method that cannot": ({"engine": "kernel"}, "cannot run this recipe"),
    **{
        f"chunks of {x!r}": ({"chunk_size": x}, "chunk_size must be a whole number")
        for x in (0, -1, 8.0, "8", True)
    },
    "chunks beyond sizes": ({"chunk_size": 10**400}, "64 bits"),
}


@pytest.mark.parametrize("what", RECALLS)
def test_recall(what: str) -> None:
    changed, says = RECALLS[what]
    refuses(lambda: _recall(**changed), says, error=ValueError)


def _x() -> Tensor:
    return torch.zeros(1, 3, 8)


LAYERS: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"d_model {x!r}": (lambda x=x: rc.MemoryLayer(x, 2, R), "d_model")
        for x in ("16", 16.0, True, 0, -1)
    },
    **{
        f"heads {x!r}": (lambda x=x: rc.MemoryLayer(16, x, R), "heads")
        for x in ("2", 2.0, True, 0, -1, 3)
    },
    **{
        f"{name} {x!r}": (lambda name=name, x=x: rc.MemoryLayer(16, 4, R, **{name: x}), name)
        for name in ("num_kv_heads", "head_dim", "value_dim")
        for x in ("2", 1.5, 0, -1)
    },
    "num_kv_heads 3": (
        lambda: rc.MemoryLayer(16, 4, R, num_kv_heads=3),
        "multiple of num_kv_heads",
    ),
    "another name": (lambda: rc.MemoryLayer(16, 4, "glaa"), "did you mean gla"),
    "a hybrid": (lambda: rc.MemoryLayer(16, 4, "titans_mac"), "rc.zoo.get('titans_mac')"),
    "learned pairs": (lambda: rc.MemoryLayer(16, 4, "ffn_relu"), "rc.zoo.get('ffn_relu').build"),
    "no recipe": (lambda: rc.MemoryLayer(16, 4, None), "takes an rc.Recipe"),  # type: ignore[arg-type]
    "the recipe first": (lambda: rc.MemoryLayer(R, 16, 4), "d_model, num_heads and recipe in this"),  # type: ignore[arg-type]
    "the name first": (
        lambda: rc.MemoryLayer("gla", 16, 4),
        "d_model, num_heads and recipe in this",
    ),  # type: ignore[arg-type]
    "options in a dict": (lambda: rc.MemoryLayer(16, 4, R, {"conv_size": 0}), "rc.LayerOptions"),  # type: ignore[arg-type]
    "another method": (lambda: rc.MemoryLayer(16, 4, R, engine="fast"), "'fast' is unknown"),
    "an override": (lambda: rc.zoo.get("gla").build(8, 2, foo=1), "no override 'foo'"),
    "a width in words": (lambda: rc.zoo.get("gla").build("8", 2), "d_model"),  # type: ignore[arg-type]
    "conv -1": (lambda: rc.LayerOptions(conv_size=-1), "conv"),
    "conv '4'": (lambda: rc.LayerOptions(conv_size="4"), "conv"),  # type: ignore[arg-type]
    "conv huge": (lambda: rc.LayerOptions(conv_size=10**400), "64 bits"),
    "an unknown option": (lambda: rc.LayerOptions.from_dict({"convolution": 4}), "'convolution'"),
    "options in a list": (lambda: rc.LayerOptions.from_dict([]), "mapping"),  # type: ignore[arg-type]
    "gates that cross": (lambda: rc.GateOptions(low=2, high=1), "low must be below high"),
    "d_model None": (lambda: rc.MemoryLayer(None, 2, R), "d_model must be a whole number"),  # type: ignore[arg-type]
    "d_model huge": (lambda: rc.MemoryLayer(10**400, 2, R), "from 1 to 2147483647"),
    "d_model 10^12": (lambda: rc.MemoryLayer(10**12, 2, R), "from 1 to 2147483647"),
    "heads None": (lambda: rc.MemoryLayer(16, None, R), "heads must be a whole number"),  # type: ignore[arg-type]
    **{
        f"depth {x!r}": (lambda x=x: rc.MemoryLayer(16, 2, R, depth=x), "depth must be (index")
        for x in (-3, "a", (1,), (0, 0), (2, 1), (-1, 2), (0, 1.5), None, (0, 1, 2))
    },
    **{
        f"x of {x}": (lambda x=x: LAYER(_x().to(x)), "the layer torch.float32: cast")
        for x in (torch.float64, torch.float16, torch.bfloat16)
    },
    "x on meta": (lambda: LAYER(_x().to("meta")), "x is on meta and the layer on cpu"),
    "a sparse x": (lambda: LAYER(_x().to_sparse()), "x must be a dense tensor"),
    "x of whole numbers": (lambda: LAYER(torch.ones(1, 3, 8).long()), "floating-point"),
    "x without rows": (lambda: LAYER(torch.zeros(3, 8)), "must have shape [B, T, 8]"),
    "x of another width": (lambda: LAYER(torch.zeros(1, 3, 9)), "must have shape [B, T, 8]"),
    "x in a list": (lambda: LAYER([[1]]), "not list"),
    "x of nan": (lambda: LAYER(_x() + torch.nan), "NaN"),
    "a mask too long": (lambda: LAYER(_x(), attention_mask=torch.ones(1, 4)), "[1, 3]"),
    "a state in words": (lambda: LAYER(_x(), "x"), "a state that this layer returned"),
}


@pytest.mark.parametrize("what", LAYERS)
def test_layers(what: str) -> None:
    call, says = LAYERS[what]
    refuses(call, says, error=ValueError)


DIAGNOSED: dict[str, tuple[Callable[[], object], str]] = {
    "whole numbers": (lambda: rc.diagnose(LAYER, torch.ones(1, 3, 8).long()), "torch.int64"),
    "a list": (lambda: rc.diagnose(LAYER, [[1.0]]), "not list"),  # type: ignore[arg-type]
    "another dtype": (lambda: rc.diagnose(LAYER, _x().double()), "the layer torch.float32"),
    "another device": (lambda: rc.diagnose(LAYER, _x().to("meta")), "on meta"),
    "no tokens": (lambda: rc.diagnose(LAYER, _x()[:, :0]), "T ≥ 1"),
    "no rows": (lambda: rc.diagnose(LAYER, _x()[:0]), "B and T ≥ 1"),
    "another width": (lambda: rc.diagnose(LAYER, torch.zeros(1, 3, 9)), "[1, 3, 9]"),
    "no layer": (lambda: rc.diagnose("x", _x()), "rc.MemoryLayer, not str"),  # type: ignore[arg-type]
    "another layer": (lambda: rc.diagnose(torch.nn.Linear(8, 8), _x()), "rc.MemoryLayer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", DIAGNOSED)
def test_diagnose(what: str) -> None:
    call, says = DIAGNOSED[what]
    refuses(call, says, error=ValueError)


def test_misspelled_gate_suggests_the_nearest() -> None:
    """The message also describes the missing gate."""
    recipe = rc.Recipe(retention=rc.retention.Decay())
    gate = torch.zeros(1, 3, 1)
    for gates, says in (
        ({"lr": gate, "logdecay": gate}, "'logdecay' is unknown to this recipe"),
        ({"lrr": gate, "log_decay": gate}, "did you mean 'lr'?"),
        ({"lr": gate, "log_decay": gate, "colour": gate}, "which needs: log_decay, lr"),
        ({"lr": gate}, "gate 'log_decay' is missing: retention.Decay"),
        ({"lr": gate, "logdecay": gate}, "gate 'log_decay' is missing: retention.Decay"),
        ({"lr": gate, "hue": gate}, "'hue' is unknown to this recipe"),
    ):
        message = refuses(
            lambda gates=gates: rc.recall(recipe, _q(), _q(), _q(), gates), says, error=ValueError
        )
        assert ("did you mean" in message) == ("lrr" in gates or "logdecay" in gates)


@pytest.mark.parametrize(
    ("module", "name"),
    [(rc.memory, "Matriks"), (rc.bias, "Hubber"), (rc, "MemoryLayr"), (rc.experiments, "compair")],
)
def test_python_can_suggest_a_name_that_a_module_lacks(module: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute {name!r}") as caught:
        getattr(module, name)
    assert caught.value.name == name and caught.value.obj is module
    assert not hasattr(module, "__nothing__")


PLACES = {
    "a word": (("nowhere else",), RuntimeError, "nowhere"),
    "a number": ((1.5,), ValueError, "takes a device, a dtype or a tensor"),
    "nothing": ((None,), ValueError, "not None"),
    "two dtypes": ((torch.float32, torch.float64), ValueError, "takes one dtype, not both"),
}


@pytest.mark.parametrize("what", PLACES)
def test_invalid_targets_of_a_state(what: str) -> None:
    convert, error, says = PLACES[what]
    _, state = LAYER(torch.zeros(1, 3, 8))
    for one in (state, state.memory):
        with pytest.raises(error, match=says):
            one.to(*convert)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes one device, not both"):
        state.to("cpu", device="cpu")


NAMES: dict[str, tuple[Callable[[], object], str]] = {
    "get": (lambda: rc.zoo.get("glaa"), "did you mean gla"),
    **{
        f"get {x!r}": (lambda x=x: rc.zoo.get(x), "by name, as in rc.zoo.get")
        for x in (["gla"], 3, None, {}, b"gla")
    },
    "get in capitals": (lambda: rc.zoo.get("GLA"), "did you mean gla"),
    "get nothing": (lambda: rc.zoo.get(""), "rc.zoo.names() lists all"),
    "get nothing like it": (lambda: rc.zoo.get("x" * 5000), "rc.zoo.names() lists all"),
    "names of a list": (lambda: rc.zoo.names(["gla"]), "has no family"),  # type: ignore[arg-type]
    "names": (lambda: rc.zoo.names("deltarule"), "has no family 'deltarule'"),
    "explain": (lambda: rc.explain("glaa"), "did you mean gla"),
    "explain 3": (lambda: rc.explain(3), "not int"),  # type: ignore[arg-type]
    "explain by a method": (lambda: rc.explain("gla", engine="fast"), "'fast' is unknown"),
    "cost": (lambda: rc.cost("glaa"), "did you mean gla"),
    "select": (lambda: rc.select_engine("glaa"), "did you mean gla"),
    "select None": (lambda: rc.select_engine(None), "takes an rc.Recipe, or the name"),  # type: ignore[arg-type]
    "select by a method": (lambda: rc.select_engine("gla", "fast"), "'fast' is unknown"),
    "capacity": (lambda: rc.theory.capacity_bound("titan", 8, 8), "did you mean titans"),
    "reproduce": (lambda: rc.reproduce("nope"), "there is no experiment 'nope'"),
    "compare a name": (lambda: rc.compare("glaa"), "named 'glaa'"),
    "compare nothing": (lambda: rc.compare([]), "at least one model"),
    "compare None": (lambda: rc.compare(None), "models must be a list, not None"),  # type: ignore[arg-type]
    "compare a number": (lambda: rc.compare([3]), "a zoo name, a preset or (name, recipe)"),  # type: ignore[list-item]
    "compare twice": (lambda: rc.compare(["gla", "gla"]), "named twice"),
    "an unknown task": (lambda: rc.compare("gla", ["texts"]), "unknown task 'texts'"),
    "a text nobody reads": (
        lambda: rc.compare("gla", "mqar", text="none.txt"),
        "text is read by the task text alone",
    ),
    "one size, two tasks": (
        lambda: rc.compare("gla", ["mqar", "capacity"], sizes=_sizes()),
        "sizes={'mqar': Sizes(...)}",
    ),
    "sizes in numbers": (lambda: rc.compare("gla", "mqar", sizes=3), "an rc.experiments.Sizes"),  # type: ignore[arg-type]
    "one unknown task": (lambda: rc.compare("gla", "texts"), "unknown task 'texts'"),
    "tasks None": (lambda: rc.compare("gla", None), "tasks must be a list"),  # type: ignore[arg-type]
    **{
        f"seed {x!r}": (lambda x=x: rc.compare("gla", "mqar", seed=x), "compare: seed must be")
        for x in (-1, 2**32, 1.5, "0", None, True)
    },
    **{
        f"jobs {x!r}": (lambda x=x: rc.compare("gla", "mqar", jobs=x), "compare: jobs must be")
        for x in (0, -1, 1.5, "2", True)
    },
    "no parameters": (lambda: rc.compare("gla", "mqar", parameters=-1), "parameters"),
    "train None": (lambda: rc.lm.train(None), "takes a TrainPlan or a TOML file, not NoneType"),  # type: ignore[arg-type]
    "train a dict": (lambda: rc.lm.train({}), "takes a TrainPlan or a TOML file, not dict"),  # type: ignore[arg-type]
    "train no file": (lambda: rc.lm.train("none.toml"), "there is no file none.toml"),
    "width -1": (lambda: rc.lm.RecollectConfig.from_recipes("gla", hidden_size=-1), "hidden_size"),
    "width '64'": (
        lambda: rc.lm.RecollectConfig.from_recipes("gla", hidden_size="64"),
        "hidden_size",
    ),
    "width huge": (
        lambda: rc.lm.RecollectConfig.from_recipes("gla", hidden_size=10**400),
        "hidden_size",
    ),
    "a model's name": (lambda: rc.lm.RecollectConfig.from_recipes("glaa"), "did you mean gla"),
    "a layer's name": (
        lambda: rc.lm.RecollectConfig.from_recipes({"a": "gla"}, layers=["b"]),
        "names the recipe 'b'",
    ),
    "a bare recipe": (lambda: rc.lm.RecollectConfig(recipes={"a": "gla"}), "recipes['a']"),
    "a deep recipe": (lambda: rc.lm.RecollectConfig(recipes={"a": _deep(3000)}), "recipes['a']"),
    "a deep recipe inside": (
        lambda: rc.lm.RecollectConfig(recipes={"a": {"recipe": _deep(3000)}}),
        "nested too deep",
    ),
    "layers of 3": (
        lambda: rc.lm.RecollectConfig.from_recipes("gla", layers=3),  # type: ignore[arg-type]
        "(layers=...) must be a list",
    ),
    "layers in a word": (
        lambda: rc.lm.RecollectConfig.from_recipes("gla", layers="gla"),
        "(layers=...) must be a list",
    ),
    "an unknown argument": (lambda: rc.lm.RecollectConfig(hidden=3), "hidden"),
}


def _deep(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"member": "Keep"}
    for _ in range(depth):
        inner = {"member": "Lq", "decay": inner}
    return {"retention": inner}


@pytest.mark.parametrize("what", NAMES)
def test_invalid_names(what: str) -> None:
    call, says = NAMES[what]
    refuses(call, says, error=ValueError)


def _state() -> dict[str, Tensor]:
    _, state = rc.recall(R, _q(), _q(), _q(), {"lr": torch.ones(1, 3, 1)})
    assert state is not None
    return state.to_dict()


STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (dict, "'position' is missing"),
    "a list": (list, "tensors by name"),
    "None": (lambda: None, "tensors by name"),
    "numbers": (lambda: {"position": 1, "sizes": 2}, "must be a tensor, not 1"),
    "no sizes": (lambda: {"position": torch.zeros(1)}, "'sizes' is missing"),
    "two sizes": (lambda: _state() | {"sizes": torch.tensor([1, 2])}, "3 whole number"),
    "a strange name": (lambda: _state() | {"weight": _q()}, "'weight' is not part"),
    "a strange number": (lambda: _state() | {"weights.x": _q()}, "'weights.x' is not part"),
    "a gap": (lambda: _state() | {"weights.5": _q()}, "lacks the tensor weights.1"),
    "a writer in numbers": (lambda: _state() | {"recipe_id": _q()}, "'recipe_id' of a state"),
    "a writer in Latin": (
        lambda: _state() | {"recipe_id": torch.tensor([233], dtype=torch.uint8)},
        "'recipe_id' of a state",
    ),
    "half of its rows": (
        lambda: _state() | {"kernel_rows.k": _q()},
        "'kernel_rows.mass' is missing",
    ),
    "half a buffer": (lambda: _state() | {"buffer.k": _q()}, "'buffer.v' is missing"),
    "rates alone": (lambda: _state() | {"buffer.rates.lr": _q()}, "'buffer.k' is missing"),
}


@pytest.mark.parametrize("what", STATES)
def test_states(what: str) -> None:
    make, says = STATES[what]
    refuses(lambda: rc.State.from_dict(make()), says, error=ValueError)


@pytest.mark.parametrize(
    ("name", "d_model", "heads"),
    [
        ("rwkv7", 32, 2),  # a wider last token
        ("mamba3", 32, 2),  # more channels of the angle
        ("preconditioned_gated_delta_net", 16, 1),  # recurrences of other heads
        ("abc", 16, 1),
        ("log_linear_attention", 16, 1),
        ("memory_caching", 32, 2),
        ("titans_mac", 32, 2),
        ("ffn_relu", None, None),
    ],
)
def test_states_of_layers_of_other_sizes(name: str, d_model: int | None, heads: int | None) -> None:
    layer = rc.zoo.get(name).build(16, 2)
    state: Any = "x"
    if d_model is not None and heads is not None:
        _, state = rc.zoo.get(name).build(d_model, heads)(torch.randn(2, 5, d_model))
    refuses(lambda: layer(torch.randn(2, 5, 16), state), "state", error=ValueError)


def test_tokens_of_a_feed_forward_layer() -> None:
    layer = rc.zoo.get("ffn_relu").build(8, 2)
    for x in ([[1.0]], _x().long(), _x().double(), _x().to("meta"), _x()[0]):
        refuses(lambda x=x: layer(x), "x ", error=ValueError)


def _shape(**sizes: Any) -> Callable[[], object]:
    return lambda: R.shapes(**{"K": 4, "V": 4, **sizes})


SIZES: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"{size} {str(x)[:8]!r}": (_shape(**{size: x}), f"{size} must be a whole number")
        for size in "KV"
        for x in (-1, 0, 1.5, "a", None, True, 10**40, 10**400)
    },
    **{
        f"pairs {str(x)[:8]!r}": (lambda x=x: R.init_shapes(4, 4, pairs=x), "pairs must be a whole")
        for x in (-1, 1.5, "a", None, True, 10**40)
    },
    "row_widths": (lambda: R.row_widths(-1), "V must be a whole number"),
    "initial_params": (lambda: rc.initial_params(R, H=10**40, K=4, V=4), "H must be a whole"),
}


@pytest.mark.parametrize("what", SIZES)
def test_sizes(what: str) -> None:
    call, says = SIZES[what]
    refuses(call, says, error=ValueError)


def _changed(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


WHOLE_NUMBER = "(hidden_size=...) must be a whole number"
# Values for config.json, and parts of the message.
CONFIGS: dict[str, tuple[Callable[[str], str], str]] = {
    "a key twice": (_changed('"head_dim"', '"hidden_size": 8, "head_dim"'), "'hidden_size' occurs"),
    "401 digits": (_changed(": 16,", ": 1" + "0" * 400 + ","), WHOLE_NUMBER),
    "41 digits": (_changed(": 16,", ": 1" + "0" * 40 + ","), WHOLE_NUMBER),
    "5001 digits": (_changed(": 16,", ": 1" + "0" * 5000 + ","), "a number of 5,001 digits"),
    "NaN": (_changed(": 16,", ": NaN,"), WHOLE_NUMBER),
    "a word": (_changed(": 16,", ': "16",'), WHOLE_NUMBER),
    "a fraction": (_changed(": 16,", ": 16.0,"), WHOLE_NUMBER),
    "lists in lists": (lambda text: "[" * 50_000 + "]" * 50_000, "nested too deep"),
    "a list": (lambda text: "[]", "must hold a mapping"),
    "half": (lambda text: text[: len(text) // 2], "is not JSON"),
    "nothing": (lambda text: "", "is not JSON"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_configurations_in_files(what: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = rc.lm.RecollectConfig.from_recipes(
        "gla", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    change, says = CONFIGS[what]
    path = tmp_path / "config.json"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    for read in (
        rc.lm.RecollectConfig.from_pretrained,
        lambda at: rc.lm.RecollectConfig.from_json_file(at / "config.json"),
        rc.lm.RecollectForCausalLM.from_pretrained,
    ):
        refuses(lambda read=read: read(tmp_path), says, error=ValueError)
    assert path.read_text() == changed


def test_pickles_are_refused(tmp_path: Any) -> None:
    planted = tmp_path / "pytorch_model.bin"
    planted.write_bytes(b"not read")
    refuses(
        lambda: rc.lm.RecollectForCausalLM.from_pretrained(tmp_path, use_safetensors=False),
        "use_safetensors=False",
        "pickle",
        error=ValueError,
    )
    assert planted.read_bytes() == b"not read"
