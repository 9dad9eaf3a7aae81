"""A saved model has a card, and remote code with which transformers loads it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect as rc

pytest.importorskip("transformers")

from tests.lm.runs import plan, write_text
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recollect.lm import RecollectConfig, RecollectForCausalLM
from recollect.lm.data.tokenizers import byte_tokenizer
from recollect.lm.model.counts import parameter_count
from recollect.lm.model.manifest import MANIFEST
from recollect.lm.training import train
from recollect.lm.training.export import export_model

CODE = "modeling_recollect.py"
IDS = torch.tensor([list(b"A memory")])


def model(recipe: str = "gated_delta_net") -> RecollectForCausalLM:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RecollectConfig.from_recipes(recipe, vocab_size=257, **sizes)
    return RecollectForCausalLM(config).eval()


def swapped(folder: Path) -> Any:
    """Return a decoder with a replaced layer, after loading."""
    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    llama = LlamaForCausalLM(config)
    rc.lm.replace_attention(llama, "gated_delta_net", layers=[1])
    llama.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def load_lines(folder: Path) -> str:
    """The first lines of Python in a model card."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0]


LOADS = """
import json, os, sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

def load(kind, folder="."):
    return kind.from_pretrained(folder, trust_remote_code=True)

assert "recollect" not in sys.modules
sys.modules["recollect"] = None  # as if it were not installed
try:
    load(AutoModelForCausalLM)
except ImportError as error:
    missing = str(error)
del sys.modules["recollect"]
tokenizer, config, model = map(load, (AutoTokenizer, AutoConfig, AutoModelForCausalLM))
ids = tokenizer("A memory", return_tensors="pt").input_ids
options = {"max_new_tokens": 6, "do_sample": False}
generated = model.generate(ids, **options).tolist()
model.save_pretrained("again")
again = load(AutoModelForCausalLM, "again")
import recollect.lm
exec(sys.argv[1])
print(json.dumps({
    "missing": missing,
    "classes": [type(x).__name__ for x in (tokenizer, config, model)],
    "registered": type(config) is type(model.config) and type(again) is type(model),
    "ours": isinstance(model, recollect.lm.RecollectForCausalLM),
    "generated": [generated, again.generate(ids, **options).tolist()],
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", pytest.param("decoder", marks=pytest.mark.slow)])
def test_transformers_loads_the_folder_by_its_remote_code(kind: str, tmp_path: Path) -> None:
    """In a new process that has not imported recollect, which prints another sentence."""
    folder, modules = tmp_path / "model", tmp_path / "modules"
    net = model() if kind == "ours" else swapped(tmp_path / "llama")
    net.save_pretrained(folder, remote_code=True)
    byte_tokenizer().save_pretrained(folder)
    process = subprocess.run(
        [sys.executable, "-c", LOADS, load_lines(folder)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(modules)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["missing"].endswith('not installed: pip install "recollect-layers[lm]"')
    assert result["classes"][1:] == [type(net.config).__name__, type(net).__name__]
    assert result["registered"] and result["ours"] == (kind == "ours")
    expected = net.generate(IDS, max_new_tokens=6, do_sample=False).tolist()
    assert result["generated"] == [expected, expected]
    # A second save gives an equal folder without code of the package.
    assert {p.name for p in folder.glob("*.py")} == {p.name for p in folder.glob("again/*.py")}
    for name in (CODE, "config.json", "README.md"):
        assert (folder / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_remote_code_is_opt_in_and_stays_until_it_is_removed(tmp_path: Path) -> None:
    net = model()
    net.save_pretrained(tmp_path / "plain")
    assert not list(tmp_path.glob("plain/*.py"))
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    net.save_pretrained(tmp_path / "code", remote_code=True)
    loaded = RecollectForCausalLM.from_pretrained(tmp_path / "code")
    loaded.config.save_pretrained(tmp_path / "config")
    assert (tmp_path / "config" / CODE).exists()
    loaded.save_pretrained(tmp_path / "without", remote_code=False)
    assert not list(tmp_path.glob("without/*.py"))
    assert "trust_remote_code" not in (tmp_path / "without" / "README.md").read_text()
    for name in ("config.json", "README.md"):
        assert (tmp_path / "without" / name).read_bytes() == (
            tmp_path / "plain" / name
        ).read_bytes()


def test_names_of_a_repository_are_dropped_from_remote_code(tmp_path: Path) -> None:
    """transformers puts the repository before them when it loads a model from the hub."""
    net = model()
    net.config.auto_map = {"AutoConfig": "some-org/some--modeling_recollect.RecollectConfig"}
    net.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoConfig"] == "modeling_recollect.RecollectConfig"
    assert len(auto_map) == 4 and (tmp_path / CODE).exists()
    for other in ("modeling_recollect.RecollectConfig", {"AutoConfig": None}, {}, None):
        net.config.auto_map = other
        net.save_pretrained(tmp_path / "other")
        assert not (tmp_path / "other" / CODE).exists()


class Mine(RecollectForCausalLM):
    """A user's model."""


def test_transformers_copies_only_code_of_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (RecollectConfig, RecollectForCausalLM):
        kind.register_for_auto_class()
        assert kind._auto_class is None
    monkeypatch.setattr(Mine, "_auto_class", None, raising=False)
    Mine.register_for_auto_class("AutoModelForCausalLM")
    Mine(model().config).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoModelForCausalLM": f"{Mine.__module__.rpartition('.')[2]}.Mine"}
    assert {p.name for p in tmp_path.glob("*.py")} == {Path(__file__).name}
    assert load_lines(tmp_path).endswith('rc.lm.RecollectForCausalLM.from_pretrained(".")\n')


def test_the_card_names_recipes_parameters_and_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import ModelCard

    net = model("samba")
    net.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    metadata = card.data.to_dict()
    assert (metadata["library_name"], metadata["tags"]) == ("recollect", ["recollect"])
    assert f"| parameters | {parameter_count(net.config):,} |" in card.text
    for name in net.config.recipes:
        assert net.config.recipe(name)[0].brief in card.text
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(load_lines(tmp_path), names)
    assert load_lines(tmp_path).count("\n") == 2
    assert torch.equal(names["model"](IDS).logits, net(IDS).logits)


def test_a_card_is_written_again_until_it_is_edited(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    model("gla").save_pretrained(tmp_path)
    assert "`gla`" in card.read_text()
    assert "README.md" not in json.loads((tmp_path / MANIFEST).read_text())["files"]
    model().save_pretrained(tmp_path)
    assert "`gated_delta_net`" in card.read_text() and "`gla`" not in card.read_text()
    for text in (card.read_text().replace("# Recollect", "# My"), "mine", "", b"\xff"):
        data = text if isinstance(text, bytes) else text.encode()
        card.write_bytes(data)
        model("gla").save_pretrained(tmp_path)
        assert card.read_bytes() == data
    RecollectForCausalLM.from_pretrained(tmp_path)  # an edited card does not prevent it


def test_a_run_writes_the_card_and_keeps_that_of_its_user(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.jsonl")
    run = plan(text, tmp_path / "run", optimizer={"steps": 2})
    folder = train(run).folder
    assert "RecollectForCausalLM" in (folder / "README.md").read_text()
    export_model(tmp_path / "run", tmp_path / "exported")
    assert (tmp_path / "exported" / "README.md").read_text() == (folder / "README.md").read_text()
    (folder / "README.md").write_text("mine")
    (tmp_path / "run" / "checkpoint-2" / "README.md").write_text("mine")
    train(replace(run, optimizer=replace(run.optimizer, steps=3)), resume=True)
    assert (folder / "README.md").read_text() == "mine"
