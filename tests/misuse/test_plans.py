"""Invalid plans of runs, in data and in files, and unchanged files after an error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.lm.runs import Recorder
from tests.misuse.sentences import digests, is_one_sentence, refuses

import recollect as rc

pytest.importorskip("accelerate")

Tables = Mapping[str, Any]


def plan_of(changes: Tables) -> rc.lm.TrainPlan:
    """Return a plan that is valid except for the changes; a change that is no table replaces it."""
    tables: dict[str, Any] = {
        "model": {"recipe": "delta_net", "width": 16, "depth": 1, "heads": 1},
        "data": {"train": "text.txt", "context": 16},
        "optimizer": {"steps": 1, "batch": 2},
        "run": {"out": "out", "save_every": 0},
    }
    for name, change in changes.items():
        table = tables.get(name)
        full = isinstance(table, dict) and isinstance(change, Mapping)
        tables[name] = {**table, **change} if full else change
    return rc.lm.TrainPlan.from_dict(tables)


HUGE = 10**400
WHOLE_NUMBERS = {
    "model": ("width", "depth", "heads", "kv_heads", "key_dim", "value_dim", "mlp", "parameters"),
    "data": ("vocab", "context", "shuffle"),
    "optimizer": ("steps", "tokens", "batch", "accumulate"),
    "run": ("seed", "save_every", "keep", "log_every", "eval_every", "heldout_rows"),
}
NUMBERS = ("lr", "warmup", "floor", "weight_decay", "clip")
WORDS = {
    "model": ("engine", "size", "start"),
    "data": ("dataset", "name", "split", "heldout_split", "column", "tokenizer"),
    "run": ("out", "device"),
}
FLAGS = {"model": ("tie",), "data": ("stream",), "run": ("bf16", "checkpointing")}

CASES: dict[str, tuple[Tables, tuple[str, ...]]] = {
    **{
        f"{table}.{key} = {str(x)[:8]!r}": ({table: {key: x}}, (f"[{table}] {key} must be",))
        for table, keys in WHOLE_NUMBERS.items()
        for key in keys
        for x in ("8", 1.5, -1, True, HUGE)
    },
    **{
        f"optimizer.{key} = {str(x)[:8]!r}": ({"optimizer": {key: x}}, (f"[optimizer] {key} must",))
        for key in NUMBERS
        for x in ("0.1", -1.0, float("nan"), float("inf"), True, HUGE)
    },
    **{
        f"{table}.{key} = {x!r}": ({table: {key: x}}, (f"[{table}] {key} must be",))
        for table, keys in WORDS.items()
        for key in keys
        for x in (3, ["a"], True, "a\0b")
    },
    **{
        f"{table}.{key} = {x!r}": ({table: {key: x}}, (f"[{table}] {key} must be true or false",))
        for table, keys in FLAGS.items()
        for key in keys
        for x in (1, "yes")
    },
    "2^63 rows": ({"optimizer": {"steps": 2**62}}, ("more rows than 64 bits",)),
    "lr = 1e30": ({"optimizer": {"lr": 1e30}}, ("[optimizer] lr", "(0, 100]")),
    "out = ''": ({"run": {"out": ""}}, ("[run] out must be a name",)),
    "out = ' '": ({"run": {"out": " "}}, ("[run] out must be a name",)),
    "device = ''": ({"run": {"device": ""}}, ("[run] device must be a name",)),
    "train = ''": ({"data": {"train": ""}}, ("[data] train must be a name",)),
    "train = []": ({"data": {"train": []}}, ("[data] needs either train",)),
    "train = {}": ({"data": {"train": {}}}, ("[data] train must be a list of strings",)),
    "NUL in train": ({"data": {"train": ["a\0b"]}}, ("[data] train", "control characters")),
    "train and dataset": ({"data": {"dataset": "d"}}, ("either train", "or dataset")),
    "two ways to hold out": (
        {"data": {"heldout": "b.txt", "heldout_share": 0.1}},
        ("heldout_share excludes heldout",),
    ),
    "half is held out": ({"data": {"heldout_share": 0.5}}, ("heldout_share", "0.5")),
    "a split of no dataset": ({"data": {"heldout_split": "test"}}, ("heldout_split", "dataset")),
    "a vocab of bytes": ({"data": {"vocab": 1000}}, ("[data] vocab", 'tokenizer = "bpe"')),
    "a vocab of a folder": (
        {"data": {"vocab": 1000, "tokenizer": "mine"}},
        ("[data] vocab", "'mine'"),
    ),
    "a small vocab": ({"data": {"vocab": 5, "tokenizer": "bpe"}}, ("[data] vocab", ">= 257")),
    "recipe and recipes": ({"model": {"recipes": {"a": "gla"}}}, ("recipes replaces recipe",)),
    "options and recipes": (
        {"model": {"recipe": "gated_delta_net", "recipes": {"a": "gla"}, "options": {}}},
        ("recipes replaces recipe",),
    ),
    "mlp and parameters": ({"model": {"mlp": 8, "parameters": 9}}, ("exclude each other",)),
    "steps and tokens": ({"optimizer": {"tokens": 100}}, ("steps and tokens exclude",)),
    "a size the papers lack": ({"model": {"size": "17M"}}, ("no size '17M'", "did you mean")),
    "start and sizes": ({"model": {"start": "out"}}, ("leave out", "width")),
    "measured on nothing": ({"run": {"eval_every": 1}}, ("eval_every", "heldout")),
    "an unknown packing": ({"data": {"packing": "rows"}}, ("[data] packing", "'rows'")),
    "unknown bad_lines": ({"data": {"bad_lines": "drop"}}, ("[data] bad_lines", "'drop'")),
    "one beta": ({"optimizer": {"betas": [0.9]}}, ("[optimizer] betas", "two numbers")),
    "a beta of 1": ({"optimizer": {"betas": [0.9, 1.0]}}, ("[optimizer] betas", "1.0")),
    "betas in words": ({"optimizer": {"betas": "0.9"}}, ("[optimizer] betas", "two numbers")),
    "a recipe of 3": ({"model": {"recipe": 3}}, ("[model] recipe", "3")),
    "a table that is none": ({"model": 3}, ("model must be a table, [model]", "3")),
    "a list of tables": ({"model": [{}]}, ("model must be a table",)),
    "an unknown table": ({"modle": {}}, ("no table [modle]", "did you mean 'model'")),
    "a table nothing is like": ({"quux": {}}, ("no table [quux]", "it has model")),
    "a key outside of its table": ({"steps": 3}, ("no table [steps]", "is a key of [optimizer]")),
    "import of a number": ({"import": 3}, ("import must be a list",)),
    "a key nothing is like": ({"data": {"zzzz": 1}}, ("no key 'zzzz'", "it has train")),
    "a long key": ({"data": {"z" * 5000: 1}}, ("[data] has no key",)),
    "nearly a key": ({"optimizer": {"step": 1}}, ("did you mean 'steps'",)),
    "a key of another table": ({"run": {"steps": 1}}, ("steps is a key of [optimizer]",)),
    **{
        f"{table}.{key}": ({table: {key: 1}}, (f"[{table}] has no key '{key}'", says))
        for table, key, says in (
            ("optimizer", "learning_rate", "did you mean 'lr'"),
            ("optimizer", "max_steps", "did you mean 'steps'"),
            ("optimizer", "batch_size", "did you mean 'batch'"),
            ("optimizer", "gradient_accumulation_steps", "did you mean 'accumulate'"),
            ("optimizer", "max_grad_norm", "did you mean 'clip'"),
            ("optimizer", "seq_len", "context is a key of [data]"),
            ("model", "hidden_size", "did you mean 'width'"),
            ("model", "num_hidden_layers", "did you mean 'depth'"),
            ("model", "num_attention_heads", "did you mean 'heads'"),
            ("model", "vocab_size", "vocab is a key of [data]"),
            ("model", "learning_rate", "lr is a key of [optimizer]"),
            ("data", "sequence_length", "did you mean 'context'"),
            ("run", "output_dir", "did you mean 'out'"),
            ("run", "save_steps", "did you mean 'save_every'"),
            ("run", "gradient_checkpointing", "did you mean 'checkpointing'"),
        )
    },
}


@pytest.mark.parametrize("what", CASES)
def test_invalid_plans(what: str) -> None:
    changes, says = CASES[what]
    refuses(lambda: plan_of(changes), *says, error=ValueError)


FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "[data] needs either train"),
    "half": (b"[data", "is not TOML"),
    "a key twice": (b'[data]\ntrain = "a"\ntrain = "b"', "is not TOML"),
    "a table twice": (b"[data]\n[data]", "is not TOML"),
    "Latin": (b'[data]\ntrain = "\xe9"', "not UTF-8 text at byte 16"),
    "JSON": (b'{"data": {"train": "a"}}', "is not TOML"),
    "lists in lists": (b"data = " + b"[" * 30_000 + b"]" * 30_000, "nested too deep"),
    "401 digits": (
        b'[data]\ntrain = "a"\n[optimizer]\nsteps = 1' + b"0" * 400,
        "[optimizer] steps must be a whole number of at most 64 bits",
    ),
    "a key of 50,000 parts": (b"a" + b".a" * 50_000 + b" = 1", "more than 32 dotted parts"),
    "more than a MiB": (b"#" * (2**20 + 1), "at most 1,048,576 are read"),
    "5001 digits": (b"[optimizer]\nsteps = 1" + b"0" * 5000, "is not TOML"),
}


@pytest.mark.parametrize("what", FILES)
def test_invalid_files(what: str, tmp_path: Path) -> None:
    content, says = FILES[what]
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    refuses(lambda: rc.lm.load_plan(path), "run.toml", says, error=ValueError)


def test_invalid_paths(tmp_path: Path) -> None:
    refuses(lambda: rc.lm.load_plan(tmp_path), "is a folder", error=ValueError)
    refuses(lambda: rc.lm.load_plan(tmp_path / "none.toml"), "there is no file", error=ValueError)
    refuses(lambda: rc.lm.load_plan("a\0b.toml"), "null byte", error=ValueError)
    os.mkfifo(tmp_path / "pipe.toml")
    refuses(lambda: rc.lm.load_plan(tmp_path / "pipe.toml"), "it is a pipe", error=ValueError)
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    refuses(lambda: rc.lm.load_plan(tmp_path / "device.toml"), "or a device", error=ValueError)
    long = tmp_path / ("x" * 300 + ".toml")
    with pytest.raises(ValueError, match="File name too long"):
        rc.lm.load_plan(long)


# Errors that need the texts, before the first step.
RUNS: dict[str, tuple[Tables, tuple[str, ...]]] = {
    "no such text": ({"data": {"train": "none.txt"}}, ("[data] train", "'none.txt'")),
    "an empty text": (
        {"data": {"train": "empty.txt"}},
        ("the text in empty.txt does not fill one row",),
    ),
    "an empty held-out text": (
        {"data": {"heldout": "empty.txt"}},
        ("the held-out text in empty.txt does not fill one row of 16 tokens",),
    ),
    "a short held-out text": (
        {"data": {"heldout": "short.txt"}},
        ("the held-out text in short.txt does not fill one row of 16 tokens",),
    ),
    "several short texts": (
        {"data": {"train": ["empty.txt", "short.txt"]}},
        ("the text in empty.txt and 1 more does not fill one row of 16 tokens",),
    ),
    "no held-out text": ({"data": {"heldout": "none.txt"}}, ("[data] heldout", "'none.txt'")),
    "a context longer than the text": (
        {"data": {"context": 100_000}},
        ("does not fill one row of 100000 tokens",),
    ),
    "a folder without texts": ({"data": {"train": "folder"}}, ("[data] train", "'folder'")),
    "text that is not UTF-8": ({"data": {"train": "latin.txt"}}, ("latin.txt:1", "not UTF-8")),
    "a bad line": ({"data": {"train": "bad.jsonl"}}, ("bad.jsonl:2", "not JSON", "bad_lines")),
    "no such column": (
        {"data": {"train": "good.jsonl", "column": "body"}},
        ("good.jsonl:1", "no field 'body'"),
    ),
    "a tokenizer that is not there": ({"data": {"tokenizer": "./mine"}}, ("no such folder",)),
    "a folder without a tokenizer": (
        {"data": {"tokenizer": "folder"}},
        ("'folder'", "holds no tokenizer", "tokenizer.json"),
    ),
    "an unknown recipe": ({"model": {"recipe": "delta_nett"}}, ("did you mean delta_net",)),
    "no such recipe file": ({"model": {"recipe": "none.json"}}, ("no file none.json",)),
    "an unknown option": ({"model": {"options": {"convolution": 1}}}, ("'convolution'",)),
    "an unknown engine": ({"model": {"engine": "fast"}}, ("'fast' is unknown",)),
    "heads that do not divide": ({"model": {"heads": 3}}, ("width", "heads")),
    "a model of 10^7 channels": (
        {"model": {"width": 10**7}},
        ("[model] has", "parameters", "smaller width"),
    ),
    "10^13 parameters": (
        {"model": {"parameters": 10**13}},
        ("[model] has 10,000,000,", "parameters", "smaller width"),
    ),
    "2^62 parameters": ({"model": {"parameters": 2**62}}, ("[model] mlp = ", "take smaller ones")),
    "matrices of 2^62 bytes": (
        {"model": {"width": 10**9, "heads": 10**9}},
        ("[model] width = 1,000,000,000", "take smaller ones"),
    ),
    "a batch of 10^9 rows": (
        {"optimizer": {"batch": 10**9}, "data": {"context": 512}},
        ("[optimizer] batch = 1,000,000,000", "fewer rows"),
    ),
    "a module that is not there": ({"import": ["nobody_has_this"]}, ("no module nobody_has",)),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts, and a run's folder with files."""
    (tmp_path / "text.txt").write_text("a memory is a map from keys to values. " * 20)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 20)
    (tmp_path / "good.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.md").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("what", RUNS)
def test_runs_that_cannot_start(what: str, place: Path) -> None:
    changes, says = RUNS[what]
    initial = digests(place)
    refuses(lambda: rc.lm.train(plan_of(changes)), *says, error=ValueError)
    assert digests(place) == initial, "nothing is lost, and nothing is left"


def test_a_run_that_is_refused_leaves_no_folder(place: Path) -> None:
    """A run without a step leaves no files; earlier files and parent folders are unchanged."""
    for out, result in (("new", False), ("out", True)):
        run = plan_of({"model": {"width": 10_000_000}, "run": {"out": out}})
        refuses(lambda run=run: rc.lm.train(run), "[model] has", error=ValueError)
        assert (place / out).exists() == result


def test_start_from_a_missing_model(place: Path) -> None:
    tables = {"data": {"train": "text.txt", "context": 16}, "optimizer": {"steps": 1}}
    plan = rc.lm.TrainPlan.from_dict({"model": {"start": "nowhere"}, **tables})
    refuses(
        lambda: rc.lm.train(plan), "[model] start 'nowhere'", "no such folder", error=ValueError
    )


def test_held_out_text_that_is_trained_on_is_refused(place: Path) -> None:
    trained = rc.lm.train(plan_of({"data": {"heldout": ["./text.txt"]}}))
    (note,) = trained.notes
    is_one_sentence(note)
    assert "text.txt is held out and trained on" in note
    (place / "copy.txt").write_bytes((place / "text.txt").read_bytes())
    events = Recorder()
    copied = plan_of({"data": {"heldout": ["copy.txt"]}, "run": {"out": "copied"}})
    trained = rc.lm.train(copied, observer=events)
    (note,) = trained.notes
    is_one_sentence(note)
    assert "copy.txt (a copy of text.txt) is held out and trained on" in note
    assert events.messages == [note]
    other = place / "other.txt"
    other.write_text("other words for other ends. " * 20)
    plan = plan_of({"data": {"heldout": ["other.txt"]}, "run": {"out": "apart"}})
    assert rc.lm.train(plan).notes == ()


def test_a_plan_of_the_file_that_names_it(place: Path) -> None:
    """`train` accepts the file by a path or by its name."""
    lines = ['[model]\nrecipe = "delta_net"\nwidth = 16\ndepth = 1\nheads = 1']
    lines += ['[data]\ntrain = "text.txt"\ncontext = 16\n[optimizer]\nsteps = 1\nbatch = 2']
    (place / "c.toml").write_text("\n".join(lines))
    assert rc.lm.train("c.toml").steps == 1
