"""``recollect adopt``: the report and the text of a published model, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

from tests.misuse.sentences import is_one_sentence
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import recollect as rc
from recollect.cli import build
from recollect.lm.data.tokenizers import byte_tokenizer

SIZES = {"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2}
OTHERS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, intermediate_size=16, num_attention_heads=2)
    ),
    "rwkv": lambda: RwkvForCausalLM(
        RwkvConfig(**SIZES, attention_hidden_size=16, intermediate_size=16, context_length=16)
    ),
    "recollect": lambda: rc.lm.RecollectForCausalLM(
        rc.lm.RecollectConfig.from_recipes("gla", num_attention_heads=2, **SIZES)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=257, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    ),
}
REFUSED = {
    "llama": "no layer that recollect computes: none of its layers is recurrent",
    "rwkv": "RwkvSelfAttention is unchanged (RWKV-4",
    "recollect": "is a model of recollect: use recollect generate",
    "t5": "holds a model of type 't5', which is not a decoder",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose type flash-linear-attention does not register again."""
    folder = tmp_path_factory.mktemp("falcon_mamba")
    torch.manual_seed(0)
    config = FalconMambaConfig(**SIZES, state_size=8, pad_token_id=0)
    FalconMambaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(build(), ["adopt", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def refused(*arguments: object) -> str:
    printed, sentence = run(*arguments, code=2)
    assert not printed
    is_one_sentence(sentence.removesuffix("\n"))
    return sentence


REPORT = """\
FalconMambaForCausalLM: 2 recurrent layers adopted
  2 × FalconMambaMixer: mamba, engine linear
"""


def test_the_report_is_printed_and_needs_no_tokenizer(saved: Path, tmp_path: Path) -> None:
    assert run(saved)[0] == REPORT
    # A vocabulary of 257 tokens is one of bytes, which needs no file.
    model = FalconMambaForCausalLM.from_pretrained(saved)
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "model")
    assert run(tmp_path / "model")[0] == REPORT
    assert "has no tokenizer" in run(tmp_path / "model", "--prompt", "a", code=2)[1]
    data = json.loads(run(saved, "--engine", "reference", "--json")[0])
    assert [layer["name"] for layer in data["layers"]] == [
        "backbone.layers.0.mixer",
        "backbone.layers.1.mixer",
    ]
    first = data["layers"][0]
    assert (first["family"], first["engine"]) == ("mamba", "reference")
    assert first["recipe"]["bias"]["member"] == "DotProduct"
    assert data["text"] is None


def test_the_text_is_that_of_the_original_model(saved: Path) -> None:
    tokenizer, model = byte_tokenizer(), FalconMambaForCausalLM.from_pretrained(saved).eval()
    ids = tokenizer("The memory", return_tensors="pt")["input_ids"]
    expected = model.generate(
        ids, max_new_tokens=6, do_sample=False, eos_token_id=256, pad_token_id=256
    )
    text = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    call = (saved, "--prompt", "The memory", "--max-new-tokens", 6)
    printed, _ = run(*call)
    assert printed == f"{REPORT}\nThe memory{text}\n"
    assert json.loads(run(*call, "--json")[0])["text"] == text


@pytest.mark.parametrize("name", OTHERS)
def test_models_without_such_layers_are_refused(name: str, tmp_path: Path) -> None:
    OTHERS[name]().save_pretrained(tmp_path)
    assert REFUSED[name] in refused(tmp_path)


def test_other_refusals(saved: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "none")
    assert "Invalid value for '--tokens'" in run(saved, "--tokens", 0, code=2)[1]
    assert "--device 'tpu' is not here" in refused(saved, "--device", "tpu")
    assert "engine='fast' is unknown" in refused(saved, "--engine", "fast")
