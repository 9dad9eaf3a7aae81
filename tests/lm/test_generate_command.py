"""``recollect generate``: the text that generation gives, streamed, and what its cache weighs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

from typer.testing import CliRunner

from recollect.cli import build
from recollect.lm import RecollectConfig, RecollectForCausalLM
from recollect.lm.data.tokenizers import byte_tokenizer

TOKENS = ["--tokens", "6"]


@pytest.fixture(scope="module", params=["gated_delta_net", "softmax_attention"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = RecollectConfig.from_recipes(
        request.param, vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    RecollectForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(build(), ["generate", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def text(*arguments: object) -> dict[str, object]:
    return json.loads(run(*arguments, *TOKENS, "--json")[0])


def test_the_text_is_that_of_generate(saved: Path) -> None:
    model, tokenizer = RecollectForCausalLM.from_pretrained(saved), byte_tokenizer()
    ids = tokenizer("The memory", return_tensors="pt")["input_ids"]
    how = {"max_new_tokens": 6, "eos_token_id": 256, "pad_token_id": 256}
    for arguments, more in (
        (["--temperature", 0], {"do_sample": False}),
        (["--beams", 3], {"do_sample": False, "num_beams": 3}),
        (
            ["--seed", 5, "--temperature", 0.7, "--top-p", 0.9, "--top-k", 40],
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40},
        ),
    ):
        generator = torch.Generator().manual_seed(5)
        want = model.generate(ids, generator=generator, **how, **more)[0, ids.shape[1] :]
        said = text(saved, "--prompt", "The memory", *arguments)
        assert said["text"] == tokenizer.decode(want, skip_special_tokens=True)
        streamed, beside = run(saved, "--prompt", "The memory", *arguments, *TOKENS)
        assert streamed == f"The memory{said['text']}\n"
        grows = "softmax" in saved.name
        assert ("growing with the text" if grows else "however long the text") in beside
        assert said["cache_grows"] == grows
        with torch.no_grad():
            cache = model(torch.cat([ids[0], want[:-1]])[None]).past_key_values
        assert said["cache_bytes_per_sequence"] == cache.nbytes


def test_reading_is_saved_and_resumed(saved: Path, tmp_path: Path) -> None:
    whole = text(saved, "--prompt", "The memory of")
    state = tmp_path / "state.safetensors"
    first = text(saved, "--prompt", "The memory", "--save-state", state)
    assert first["text"] == text(saved, "--from-state", state)["text"]
    assert whole["text"] == text(saved, "--from-state", state, "--prompt", " of")["text"]
    assert text(saved)["tokens"]  # a text of its own begins where another ended


def test_refusals_are_one_sentence(saved: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ([tmp_path / "none"], "there is no folder"),
        ([tmp_path], "has no config.json"),
        ([saved, "--temperature", -1], "--temperature must be 0 or above, not -1.0"),
        ([saved, "--top-p", 0], "--top-p must be above 0"),
        ([saved, "--top-k", 0], "--top-k must be at least 1"),
        ([saved, "--beams", 0], "--beams must be at least 1"),
        ([saved, "--tokens", 0], "--tokens must be at least 1"),
        ([saved, "--device", "tpu"], "--device tpu is not here"),
        ([saved, "--from-state", tmp_path / "no"], "there is no file"),
        ([saved, "--from-state", saved / "model.safetensors"], "is no saved prompt"),
    ):
        _, said = run(*arguments, code=2)
        assert says in said
        assert said.startswith("recollect generate: ")
        assert said.count("\n") == 1


def test_a_model_of_bytes_needs_no_tokenizer(saved: Path, tmp_path: Path) -> None:
    model = RecollectForCausalLM.from_pretrained(saved)
    model.save_pretrained(tmp_path / "bytes")
    assert text(tmp_path / "bytes", "--prompt", "é") == {
        **text(saved, "--prompt", "é"),
        "tokens_per_second": pytest.approx(0, abs=1e9),
    }
    config = RecollectConfig.from_recipes(
        "gla", vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    RecollectForCausalLM(config).save_pretrained(tmp_path / "other")
    _, said = run(tmp_path / "other", "--prompt", "a", code=2)
    assert "has no tokenizer, and 300 tokens are not bytes" in said
