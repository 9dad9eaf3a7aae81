"""Saved models are equal bit by bit, and a damaged one gives one sentence."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect as rc

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from tests.lm.families import every_family, model, text
from tests.misuse.mutations import named_twice
from transformers import AutoModelForCausalLM

from recollect.lm import CheckpointError, RecollectForCausalLM, RecollectModel

QKV = "model.blocks.0.layer.qkv.weight"


# Weights in bfloat16 are cast by `Module.to`, for any recipe.
IN_BFLOAT16 = ("gated_delta_net", "titans", "hybrid")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(*param.values, torch.float32, marks=param.marks)
            for param in every_family()
        ),
        ("hybrid", torch.float32),
        *((name, torch.bfloat16) for name in IN_BFLOAT16),
        *(
            pytest.param(name, torch.bfloat16, marks=pytest.mark.slow)
            for name in rc.zoo.names()
            if name not in IN_BFLOAT16
        ),
    ],
    ids=str,
)
def test_save_and_load_are_exact(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    net = RecollectForCausalLM(model(name).config).eval()
    net.load_state_dict(model(name).state_dict())
    net.to(dtype).save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".md", ".safetensors"}  # no code
    back = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(back) is RecollectForCausalLM
    assert back.dtype == dtype
    mine, its = net.state_dict(), back.state_dict()
    assert list(mine) == list(its)
    assert all(torch.equal(its[n], x) and its[n].dtype == x.dtype for n, x in mine.items())
    with torch.no_grad():
        assert torch.equal(back(text()).logits, net(text()).logits)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    model("gated_delta_net").save_pretrained(folder)
    return folder


Change = Callable[[Path], object]


def raw(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda d: (d / name).write_bytes(change((d / name).read_bytes()))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {name: x.clone() for name, x in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def header(**entry: object) -> Change:
    """Return a change of the first tensor's entry in the header."""

    def apply(data: bytes) -> bytes:
        size = struct.unpack("<Q", data[:8])[0]
        entries = json.loads(data[8 : 8 + size])
        entries[next(name for name in entries if name != "__metadata__")].update(entry)
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return raw("model.safetensors", apply)


def replaced_by_a_pipe(name: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return apply


def replaced_by_a_device(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def config(**fields: object) -> Change:
    def apply(data: bytes) -> bytes:
        return json.dumps({**json.loads(data), **fields}).encode()

    return raw("config.json", apply)


def recipe(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["recipes"]["gated_delta_net"])
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def sharded(name: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        index = {"weight_map": {QKV: name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def repeated(folder: Path) -> None:
    sharded("part.safetensors")(folder)
    shutil.copy(folder / "part.safetensors", folder / "other.safetensors")
    index = {"weight_map": {QKV: "part.safetensors", "lm_head.weight": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


CORRUPTIONS: dict[str, tuple[Change, str]] = {
    "weights cut": (raw("model.safetensors", lambda b: b[: len(b) // 2]), "cut short or altered"),
    "weights cut in the header": (raw("model.safetensors", lambda b: b[:20]), "cut short"),
    "weights empty": (raw("model.safetensors", lambda b: b""), "cut short"),
    "weights longer": (raw("model.safetensors", lambda b: b + b"more"), "cut short or altered"),
    "header of 2^60 bytes": (
        raw("model.safetensors", lambda b: struct.pack("<Q", 2**60) + b[8:]),
        "header too large",
    ),
    "header not text": (
        raw("model.safetensors", lambda b: b[:8] + b"\xff" * 30 + b[38:]),
        "cut short or altered",
    ),
    "negative shape": (header(shape=[-1, 4]), "cut short or altered"),
    "offsets beyond the file": (header(data_offsets=[0, 10**9]), "cut short or altered"),
    "unknown type": (header(dtype="PICKLE"), "unknown variant `PICKLE`"),
    "weight missing": (weights(lambda x: x.pop(QKV)), f"lacks the weight '{QKV}'"),
    "weight too many": (
        weights(lambda x: x.update(evil=torch.zeros(2))),
        "has the weight 'evil', unknown to config.json",
    ),
    "weight of another shape": (
        weights(lambda x: x.update({QKV: x[QKV][:-1].contiguous()})),
        r"has shape \[95, 32\], and config.json requires \[96, 32\]",
    ),
    "weight of integers": (weights(lambda x: x.update({QKV: x[QKV].long()})), "has type I64"),
    "weight not a number": (
        weights(lambda x: x[QKV].view(-1)[3:4].fill_(float("nan"))),
        f"'{QKV}' holds NaN or infinity",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
    "pickled weights": (pickled, "has no model.safetensors"),
    "index out of the folder": (
        sharded("../model.safetensors"),
        "must map weights to files of this folder",
    ),
    "shard missing": (sharded("absent.safetensors"), "there is no file .*absent.safetensors"),
    "weight in two files": (repeated, r"has the weight '.*' in two files"),
    "config cut": (raw("config.json", lambda b: b[:200]), "config.json is not JSON"),
    "config not text": (raw("config.json", lambda b: b"\xff\xfe" * 9), "is not UTF-8 text"),
    "config a list": (raw("config.json", lambda b: b"[1]"), "must hold a mapping, not a list"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "another model type": (config(model_type="llama"), "holds a model of type 'llama'"),
    "another schema": (config(schema=1), "has schema 1"),
    "negative size": (config(hidden_size=-32), r"hidden_size=...\) must be .* not -32"),
    "size as text": (config(hidden_size="32"), "not '32'"),
    "size not a number": (config(vocab_size=float("nan")), "not nan"),
    "endless size": (config(num_hidden_layers=10**9), "from 1 to 10000, not 1000000000"),
    "truth for a size": (config(num_hidden_layers=True), "not True"),
    "heads that do not divide": (
        config(num_attention_heads=3),
        "hidden_size = 32 is not a multiple of num_attention_heads = 3",
    ),
    "more layers": (config(num_hidden_layers=3), "lacks the weight 'model.blocks.2.*12 more"),
    "fewer layers": (config(num_hidden_layers=1), "unknown to config.json"),
    "unknown field": (config(hiden_size=3), "did you mean 'hidden_size'"),
    "unknown number type": (config(dtype="load"), "must be one of float32"),
    "token out of range": (config(pad_token_id=99), "a token from 0 to 23, not 99"),
    "several padding tokens": (config(pad_token_id=[0, 1]), r"from 0 to 23, not \[0, 1\]"),
    "recipes a list": (config(recipes=[]), "must be a mapping"),
    "unknown recipe": (config(layers=["x"]), "is not among"),
    "unknown choice": (recipe(lambda r: r["recipe"].update(biass={})), "no choice 'biass'"),
    "unknown member": (
        recipe(lambda r: r["recipe"].update(bias={"member": "os.system"})),
        "no member named 'os.system' is registered",
    ),
    "option of another type": (recipe(lambda r: r["options"].update(conv_size="4")), "not '4'"),
    "option changed": (
        recipe(lambda r: r["options"].update(conv_size=5)),
        "conv.weight' has shape",
    ),
    "tie without a rule": (
        recipe(lambda r: r["options"].update(ties=[{"target": "lr", "source": "log_decay"}])),
        "Tie needs rule",
    ),
    "attribute of Python": (config(__class__=5), "config.json has the key '__class__'"),
    "all attributes": (config(__dict__={"a": 1}), "config.json has the key '__dict__'"),
    "method of Python": (config(__init__="x"), "config.json has the key '__init__'"),
    "method of ours": (config(_check=5), "has no field '_check'"),
    "attribute for generation": (
        raw("generation_config.json", lambda b: b'{"__class__": 5}'),
        "generation_config.json has the key '__class__'",
    ),
    "weight named twice": (raw("model.safetensors", named_twice), "'lm_head.weight' occurs twice"),
    "weights a pipe": (replaced_by_a_pipe("model.safetensors"), "it is a pipe, a socket or a"),
    "weights a device": (replaced_by_a_device, "it is a pipe, a socket or a device"),
    "manifest a pipe": (replaced_by_a_pipe("manifest.json"), "it is a pipe, a socket or a"),
    "generation config a pipe": (replaced_by_a_pipe("generation_config.json"), "it is a pipe"),
    "generation config cut": (raw("generation_config.json", lambda b: b"{"), "is not JSON"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_damaged_checkpoint_gives_one_sentence(what: str, sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(sound, folder)
    change, says = CORRUPTIONS[what]
    change(folder)
    with pytest.raises((CheckpointError, rc.RecipeError), match=says) as caught:
        RecollectForCausalLM.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450
    assert caught.value.__cause__ is None
    # Transformers reads and refuses these before it knows the class.
    if what not in ("another model type",):
        # Transformers before 5.24 raises a TypeError for a list.
        with pytest.raises((ValueError, OSError, TypeError)):
            AutoModelForCausalLM.from_pretrained(folder)


def test_folder_of_a_model_without_a_head(tmp_path: Path, sound: Path) -> None:
    base = RecollectModel.from_pretrained(sound)
    base.save_pretrained(tmp_path)
    assert torch.equal(
        RecollectModel.from_pretrained(tmp_path)(text()).last_hidden_state,
        model("gated_delta_net").model(text()).last_hidden_state,
    )
    with pytest.raises(CheckpointError, match=r"lacks the weight 'lm_head\.weight'"):
        RecollectForCausalLM.from_pretrained(tmp_path)


def test_missing_folder_gives_one_sentence(sound: Path) -> None:
    for path in (sound / "config.json", sound / "absent", "./absent"):
        with pytest.raises(CheckpointError, match="there is no folder"):
            RecollectForCausalLM.from_pretrained(path)


def test_options_of_loading(sound: Path) -> None:
    net, info = RecollectForCausalLM.from_pretrained(sound, output_loading_info=True)
    assert not info["missing_keys"]
    half = RecollectForCausalLM.from_pretrained(sound, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    loaded = RecollectForCausalLM.from_pretrained(sound, config=net.config)
    assert torch.equal(loaded.lm_head.weight, net.lm_head.weight)
    options = {"config": net.config, "state_dict": net.state_dict()}
    no_folder = RecollectForCausalLM.from_pretrained(None, **options)
    assert torch.equal(no_folder.lm_head.weight, net.lm_head.weight)


def files(folder: Path) -> set[str]:
    return set(json.loads((folder / "manifest.json").read_text())["files"])


def flip(folder: Path) -> None:
    weights(lambda x: x[QKV].neg_())(folder)


MEANT = "if the change is meant, delete manifest.json"


@pytest.mark.parametrize(
    "change",
    [flip, weights(lambda x: x[QKV].zero_()), config(use_cache=False), config(rms_norm_eps=1e-3)],
    ids=["flipped", "zeroed", "edited", "another constant"],
)
def test_checksum_detects_changes_that_formats_accept(
    change: Change, sound: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    assert files(folder) == {"config.json", "generation_config.json", "model.safetensors"}
    change(folder)
    for load in (RecollectForCausalLM, RecollectModel, AutoModelForCausalLM):
        with pytest.raises(CheckpointError, match="altered since it was saved") as caught:
            load.from_pretrained(folder)
        assert MEANT in str(caught.value) and "\n" not in str(caught.value)
    (folder / "manifest.json").unlink()
    RecollectForCausalLM.from_pretrained(folder)


def test_manifest_follows_each_save(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    (folder / "notes.txt").write_text("mine")
    net = RecollectForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        net.lm_head.weight.zero_()
    net.save_pretrained(folder, max_shard_size="4KB")
    assert "notes.txt" not in files(folder) and len(files(folder)) > 4
    assert not bool(RecollectForCausalLM.from_pretrained(folder).lm_head.weight.any())
    (folder / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks generation_config\.json, which it was saved"):
        RecollectForCausalLM.from_pretrained(folder)
