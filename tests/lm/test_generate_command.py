"""``recollect generate``: the text of generation, streamed, and the size of its cache."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

import transformers
from tests.misuse.mutations import named_twice
from tests.misuse.sentences import digests, is_one_sentence
from typer.testing import CliRunner

import recollect as rc
from recollect.cli import build
from recollect.cli import generate as command
from recollect.lm import RecollectConfig, RecollectForCausalLM
from recollect.lm.data.tokenizers import byte_tokenizer, load_tokenizer
from recollect.lm.hub import _responds, offline_kwargs
from recollect.lm.loading import load_model_and_tokenizer

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


def test_text_equals_generate(saved: Path) -> None:
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
        output = text(saved, "--prompt", "The memory", *arguments)
        assert output["text"] == tokenizer.decode(want, skip_special_tokens=True)
        streamed, stderr = run(saved, "--prompt", "The memory", *arguments, *TOKENS)
        assert streamed == f"The memory{output['text']}\n"
        grows = "softmax" in saved.name
        assert ("growing with the text" if grows else "however long the text") in stderr
        assert output["cache_grows"] == grows
        with torch.no_grad():
            cache = rc.lm.cache_of(model(torch.cat([ids[0], want[:-1]])[None]))
        assert output["cache_bytes_per_sequence"] == cache.nbytes


def test_prompt_is_saved_and_resumed(saved: Path, tmp_path: Path) -> None:
    full = text(saved, "--prompt", "The memory of")
    state = tmp_path / "state.safetensors"
    first = text(saved, "--prompt", "The memory", "--save-state", state)
    assert first["text"] == text(saved, "--from-state", state)["text"]
    assert full["text"] == text(saved, "--from-state", state, "--prompt", " of")["text"]
    assert text(saved)["tokens"]  # a new text after the end of another


def test_refusals_are_one_sentence(saved: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ([tmp_path / "none"], "there is no folder"),
        ([tmp_path], "has no config.json"),
        ([saved, "--device", "tpu"], "--device 'tpu' is not here"),
        ([saved, "--from-state", tmp_path / "no"], "there is no file"),
        ([saved, "--from-state", saved / "model.safetensors"], "is not a saved prompt"),
    ):
        _, output = run(*arguments, code=2)
        assert says in output
        assert output.startswith("recollect generate: ")
        assert output.count("\n") == 1


def test_a_state_replaces_only_a_state(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("mine")
    initial = digests(tmp_path) | digests(saved)
    for path in (tmp_path / "text.txt", tmp_path, saved / "model.safetensors"):
        _, output = run(saved, "--prompt", "a", "--save-state", path, code=2)
        assert f"--save-state {path} exists and is not the file of a state" in output
    assert digests(tmp_path) | digests(saved) == initial
    for prompt in ("a", "b"):
        run(saved, *TOKENS, "--prompt", prompt, "--save-state", tmp_path / "state")


@pytest.mark.parametrize(
    "saved",
    ["gated_delta_net", pytest.param("softmax_attention", marks=pytest.mark.slow)],
    indirect=True,
)
def test_prompt_is_read_from_a_pipe(saved: Path) -> None:
    """Equal to the option; a terminal is not read, and an option takes precedence over a pipe."""

    def piped(stdin: bytes, *arguments: str) -> dict[str, object]:
        requested = ["generate", str(saved), *arguments, *TOKENS, "--temperature", "0", "--json"]
        result = CliRunner().invoke(build(), requested, input=stdin)
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout)

    for typed in ("hello", "größer\nals", ""):
        expected = text(saved, "--prompt", typed, "--temperature", 0)
        for piped_text in (typed, typed + "\n", typed + "\r\n"):
            for arguments in ((), ("--prompt", "-")):
                read = piped(piped_text.encode(), *arguments)
                assert (read["prompt"], read["text"]) == (typed, expected["text"])
    assert piped(b"hello", "--prompt", "other")["prompt"] == "other"
    assert piped(b"hello", "--prompt", "")["prompt"] == ""
    result = CliRunner().invoke(build(), ["generate", str(saved)], input=b"\xff\xfe")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text" in result.stderr


def test_terminal_is_not_read_and_an_empty_pipe_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    primary, terminal = os.openpty()
    with os.fdopen(terminal) as typed:
        monkeypatch.setattr("sys.stdin", typed)
        assert command._read_prompt(None) == ""
    os.close(primary)

    reading, writing = os.pipe()
    monkeypatch.setattr(command, "STDIN_HINT_SECONDS", 0.0)
    with os.fdopen(reading) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        late = threading.Timer(0.2, lambda: (os.write(writing, b"late\n"), os.close(writing)))
        late.start()
        assert command._read_prompt(None) == "late"
        late.join()
    assert "reading the prompt from the standard input" in capsys.readouterr().err


def test_run_folder_names_its_model(saved: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "mine"
    shutil.copytree(saved, run_folder / "model")
    (run_folder / "plan.json").write_text("{}")
    requested = ("--prompt", "The", "--temperature", 0)
    assert text(run_folder, *requested)["text"] == text(saved, *requested)["text"]
    (run_folder / "model").rename(run_folder / "checkpoint-3")
    (run_folder / "checkpoint-3" / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (run_folder / "checkpoint-3" / name).write_bytes(b"")
    _, output = run(run_folder, code=2)
    assert "has not come to its end: name its last checkpoint" in output
    assert str(run_folder / "checkpoint-3") in output
    shutil.rmtree(run_folder / "checkpoint-3")
    assert "and has no checkpoint yet" in run(run_folder, code=2)[1]


def test_adapter_error_names_the_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    _, output = run(tmp_path, code=2)
    assert "holds an adapter of PEFT" in output and "merge_and_unload()" in output
    assert output.count("\n") == 1


def test_new_tokens_have_the_name_that_transformers_gives_them(saved: Path) -> None:
    requested = (saved, "--prompt", "The", "--temperature", 0, "--json")
    short, same = (run(*requested, option, 3)[0] for option in ("--tokens", "--max-new-tokens"))
    assert json.loads(short)["text"] == json.loads(same)["text"]
    assert json.loads(same)["tokens"] == 3


def test_size_of_the_cache_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text(encoding="utf-8")
    match = re.search(
        r"A `(\w+)` model \((\d+) layers, width (\d+), (\d+) heads\) prints\n\n +(.*)",
        page,
    )
    assert match is not None
    name, depth, width, heads, line = match.groups()
    config = RecollectConfig.from_recipes(
        name,
        vocab_size=257,
        hidden_size=int(width),
        num_hidden_layers=int(depth),
        num_attention_heads=int(heads),
    )
    model = RecollectForCausalLM(config).eval()
    with torch.no_grad():
        cache = rc.lm.cache_of(model(torch.tensor([[1, 2, 3]]), use_cache=True))
    assert command._describe_cache(command._cache_facts(model, cache)) == line


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
    _, output = run(tmp_path / "other", "--prompt", "a", code=2)
    assert "has no tokenizer, and its vocabulary of 300 tokens" in output


# -- decoders whose layers were replaced, and other models -----------------------------------------


@pytest.fixture(scope="module")
def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=257,
            bos_token_id=256,
            eos_token_id=256,
        )
    )


@pytest.mark.parametrize(("layers", "grows"), [(None, False), ([0], True)])
def test_decoder_with_replaced_layers_continues(
    llama: transformers.LlamaForCausalLM, layers: list[int] | None, grows: bool, tmp_path: Path
) -> None:
    model = copy.deepcopy(llama)
    rc.lm.replace_attention(model, "gated_delta_net", layers=layers)
    model.save_pretrained(tmp_path / "m")
    byte_tokenizer().save_pretrained(str(tmp_path / "m"))
    ids = byte_tokenizer()("The memory", return_tensors="pt")["input_ids"]
    want = model.eval().generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=256)
    output = text(tmp_path / "m", "--prompt", "The memory", "--temperature", 0)
    assert output["text"] == byte_tokenizer().decode(want[0, ids.shape[1] :])
    assert output["cache_grows"] is grows and output["cache_columns"] == ids.shape[1] + 5
    # Per sequence: keys and values of 15 tokens, 2 heads of 16 channels, and the states.
    attention_bytes = 2 * 2 * 16 * 4 * output["cache_columns"] if grows else 0  # type: ignore[operator]
    state = 2 * 16 * 16 * 4  # two matrices at least
    assert attention_bytes + state * (1 if grows else 2) <= int(
        str(output["cache_bytes_per_sequence"])
    )
    assert int(str(output["cache_bytes_per_sequence"])) < attention_bytes + 4 * state
    one, other = (text(tmp_path / "m", "--seed", seed)["text"] for seed in (1, 1))
    assert one == other
    for option in ("--save-state", "--from-state"):
        _, why = run(tmp_path / "m", "--prompt", "a", option, tmp_path / "state", code=2)
        assert f"{option} is for models of recollect alone" in why
        assert why.count("\n") == 1


def test_model_of_another_type_is_refused(
    llama: transformers.LlamaForCausalLM, tmp_path: Path
) -> None:
    llama.save_pretrained(tmp_path / "m")
    _, why = run(tmp_path / "m", "--prompt", "a", code=2)
    assert "holds a model of type 'llama': generate takes one that recollect has trained" in why
    assert why.count("\n") == 1


# -- the hub --------------------------------------------------------------------------------------


class Line:
    """A session without a connection, or with a hub that answers."""

    def __init__(self, answers: bool) -> None:
        self.answers, self.num_requests = answers, 0

    def head(self, url: str, timeout: float) -> None:
        self.num_requests += 1
        assert timeout <= 5
        if not self.answers:
            raise OSError("Name or service not known")


def test_unreachable_hub_is_requested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for half a minute of retries, and never for a folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the client of the hub waits and asks again")

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", never)
    line = Line(answers=False)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: line)
    monkeypatch.setattr("recollect.lm.hub.time", clock)
    _responds.cache_clear()
    _, why = run("some-org/nope", "--prompt", "a", code=2)
    assert "there is no folder 'some-org/nope', and no model of that name can be fetched" in why
    assert why.count("\n") == 1
    assert line.num_requests == 1
    with pytest.raises(ValueError, match="there is no such folder, and the hub gives no tokenizer"):
        load_tokenizer("some-org/nope")
    assert line.num_requests == 1  # the result is remembered for a minute
    clock.monotonic = lambda: 60.0
    assert offline_kwargs("some-org/nope") == {"local_files_only": True} and line.num_requests == 2
    line.answers = True  # the connection is restored
    clock.monotonic = lambda: 120.0
    assert offline_kwargs("some-org/nope") == {}
    _responds.cache_clear()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ("[1]", "Error: "),
        ("", "Expecting value"),
        ("pipe", "cannot be read: it is a pipe"),
    ],
    ids=["lists", "objects", "a list", "nothing", "a pipe"],
)
def test_a_broken_tokenizer_is_refused_in_one_sentence(
    name: str, content: str, reason: str, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    (folder / name).unlink()
    os.mkfifo(folder / name) if content == "pipe" else (folder / name).write_text(content)
    _, why = run(folder, "--prompt", "a", code=2)
    is_one_sentence(why.strip())
    assert reason in why
    with pytest.raises(ValueError, match=reason):
        load_tokenizer(str(folder))


def test_other_decoders_are_checked_before_loading(tmp_path: Path) -> None:
    """A header that names a tensor twice, of which safetensors takes the last."""
    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(named_twice(path.read_bytes()))
    with pytest.raises(ValueError, match="occurs twice"):
        load_model_and_tokenizer(str(tmp_path), any_decoder=True)


def test_folder_needs_no_hub(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    line = Line(answers=True)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: line)
    monkeypatch.setattr("recollect.lm.hub.time", SimpleNamespace(monotonic=lambda: 0.0))
    _responds.cache_clear()
    assert offline_kwargs(str(saved)) == {} and line.num_requests == 0
    assert offline_kwargs("some-org/some") == {} and line.num_requests == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert offline_kwargs("some-org/some") == {"local_files_only": True} and line.num_requests == 1
    _responds.cache_clear()
