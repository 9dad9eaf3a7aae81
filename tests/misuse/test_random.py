"""Random changes of valid recipes, configurations, plans, weights and checkpoints.

Each change is refused in one sentence or is visible in the loaded data: no old number in its place,
no traceback, and no executed code. The written files are parsed here without the library.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.misuse.mutations import RAN, changed_bytes, changed_text, missing, parsed
from tests.misuse.sentences import digests, is_one_sentence

import recollect as rc

pytest.importorskip("accelerate")
from tests.lm.runs import plan as plan_of
from tests.lm.runs import write_text

from recollect.lm.training.resume import resolve_start

Case = Callable[[random.Random, Path], str | None]
"""Makes one change, loads it, and returns the fault or ``None``."""


def refused(load: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the loaded data (``None`` if refused), and the fault of a refusal."""
    try:
        return load(), None
    except ValueError as error:
        try:
            is_one_sentence(str(error))
        except AssertionError as wrong:
            return None, f"{type(error).__name__}: {wrong}"
        return None, None
    except Exception as error:
        return None, f"{type(error).__name__}: {error!s:.300}"


# -- recipes --------------------------------------------------------------------------------------

RECIPES = [rc.zoo.get(name).recipe.to_json(indent=1) for name in rc.zoo.names()]


def recipe(draw: random.Random, folder: Path) -> str | None:
    text = changed_text(draw.choice(RECIPES), draw)
    path = folder / "recipe.json"
    path.write_text(text, encoding="utf-8")
    loaded, wrong = refused(lambda: rc.load_recipe(path))
    if wrong or loaded is None:
        return wrong and f"{text!r:.200}: {wrong}"
    try:
        return missing(parsed(text), loaded.to_dict())
    except ValueError as error:
        return f"{error}, and it was loaded"


# -- configurations -------------------------------------------------------------------------------


def small(name: str = "gated_delta_net") -> rc.lm.RecollectConfig:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return rc.lm.RecollectConfig.from_recipes(name, intermediate_size=16, **sizes)


CONFIGS = [small(name).to_json_string() for name in ("gated_delta_net", "titans", "hedgehog")]
WRITTEN_ANEW = ("transformers_version", "model_type", "architectures", "dtype")


def configuration(draw: random.Random, folder: Path) -> str | None:
    text = changed_text(draw.choice(CONFIGS), draw)
    (folder / "config.json").write_text(text, encoding="utf-8")
    loaded, wrong = refused(lambda: rc.lm.RecollectConfig.from_pretrained(folder))
    if wrong or loaded is None:
        return wrong and f"{text!r:.200}: {wrong}"
    try:
        expected = parsed(text)
    except ValueError as error:
        return f"{error}, and it was loaded"
    result = loaded.to_dict()
    for name, entry in result["recipes"].items():
        built, options = loaded.recipe(name)
        full = {"recipe": built.to_dict(), "options": options.to_dict()}
        fault = missing(entry, full, f"recipes.{name}")
        if fault is not None:
            return fault
    # Keys of transformers without a meaning for a configuration are left out by it.
    common = {k: x for k, x in expected.items() if k in result and k not in WRITTEN_ANEW}
    return missing(common, result)


# -- plans ----------------------------------------------------------------------------------------

PLAN = """
[model]
recipe = "delta_net"
width = 16
depth = 2
heads = 2
mlp = 24
tie = true
[data]
train = ["a.txt", "b.txt"]
context = 16
heldout_share = 0.1
[optimizer]
steps = 30
batch = 2
accumulate = 3
lr = 3e-3
warmup = 0.1
floor = 0.01
weight_decay = 0.1
betas = [0.9, 0.95]
clip = 1.0
[run]
out = "out"
seed = 7
save_every = 5
keep = 2
log_every = 1
eval_every = 5
heldout_rows = 20
bf16 = false
"""


def plan(draw: random.Random, folder: Path) -> str | None:
    text = changed_text(PLAN, draw, toml=True)
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    loaded, wrong = refused(lambda: rc.lm.load_plan(path))
    if wrong or loaded is None:
        return wrong and f"{text!r:.600}: {wrong}"
    expected, result = tomllib.loads(text), loaded.to_dict()
    for table in expected.values():
        if isinstance(table.get("train"), str):
            table["train"] = [table["train"]]
    return missing(expected, result)


# -- weights --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    folder = tmp_path_factory.mktemp("model")
    rc.lm.RecollectForCausalLM(small()).save_pretrained(folder)
    return folder


def read_weights(data: bytes) -> dict[str, np.ndarray]:
    """Read safetensors by their specification, without the library."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    result = {}
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            kind = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[entry["dtype"]]
            result[name] = np.frombuffer(body[low:high], kind).reshape(entry["shape"])
    return result


def weights(model: Path, *, manifest: bool) -> Case:
    """Changes of the file of weights, with its manifest or without one."""
    full = (model / "model.safetensors").read_bytes()
    head = 8 + struct.unpack("<Q", full[:8])[0]

    def case(draw: random.Random, folder: Path) -> str | None:
        copy = folder / "model"
        if not copy.exists():
            shutil.copytree(model, copy)
            if not manifest:
                (copy / "manifest.json").unlink()
        data = changed_bytes(full, draw, within=draw.choice((8, head, None)))
        (copy / "model.safetensors").write_bytes(data)
        loaded, wrong = refused(lambda: rc.lm.RecollectForCausalLM.from_pretrained(copy))
        if wrong or loaded is None:
            return wrong
        if manifest:
            return None if data == full else "another file was loaded than its manifest says"
        own_weights = loaded.state_dict()
        for name, x in read_weights(data).items():
            if name in own_weights and not np.array_equal(
                own_weights[name].numpy(), x.astype("<f4")
            ):
                return f"{name} is not what the file holds"
        return None

    return case


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its last checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    text = write_text(folder / "t.jsonl")
    rc.lm.train(plan_of(text, folder / "out", optimizer={"steps": 2}))
    return folder


def checkpoint(run: Path) -> Case:
    """Changes of any file of a checkpoint that a run would resume from."""
    (full,) = (run / "out").glob("checkpoint-*")
    files = sorted(path.relative_to(full) for path in full.rglob("*") if path.is_file())

    def case(draw: random.Random, folder: Path) -> str | None:
        out = folder / "out"
        copy = out / full.name
        if copy.exists():
            shutil.rmtree(copy)
        shutil.copytree(full, copy)
        name = draw.choice(files)
        old = (copy / name).read_bytes()
        if name.suffix == ".json":
            text = changed_text(old.decode(), draw)
            new = text.encode()
        else:
            new = changed_bytes(old, draw) if old else b"x"
        (copy / name).write_bytes(new)
        initial = digests(copy)
        mine = plan_of(run / "t.jsonl", out, optimizer={"steps": 2})
        loaded, wrong = refused(lambda: resolve_start(mine, out, resume=True))
        if digests(copy) != initial:
            return f"{name} was changed by looking at it"
        if wrong or loaded is None:
            return wrong and f"{name}: {wrong}"
        # A list of files may lack some, or state a true fact; a model card is not read.
        unread = name.name in ("manifest.json", "README.md")
        return None if new == old or unread else f"{name} was changed, and is gone on from"

    return case


# -- the suite ------------------------------------------------------------------------------------

FEW = {"recipe": 20, "configuration": 10, "plan": 14, "weights": 5, "bare": 5, "checkpoint": 6}
MANY = {
    "recipe": 800,
    "configuration": 350,
    "plan": 400,
    "weights": 100,
    "bare": 150,
    "checkpoint": 200,
}
assert sum(FEW.values()) == 60
assert sum(MANY.values()) == 2000


@pytest.mark.filterwarnings("ignore")  # of transformers, about other types of models
@pytest.mark.parametrize(
    ("what", "seed", "count"),
    [
        *((what, 1, count) for what, count in FEW.items()),
        *(pytest.param(what, 2, n, marks=pytest.mark.slow) for what, n in MANY.items()),
    ],
)
def test_changed_at_random(
    what: str,
    seed: int,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    cases: dict[str, Callable[[], Case]] = {
        "recipe": lambda: recipe,
        "configuration": lambda: configuration,
        "plan": lambda: plan,
        "weights": lambda: weights(request.getfixturevalue("model"), manifest=True),
        "bare": lambda: weights(request.getfixturevalue("model"), manifest=False),
        "checkpoint": lambda: checkpoint(request.getfixturevalue("run")),
    }
    case, failures = cases[what](), []
    for index in range(count):
        wrong = case(random.Random(f"{what} {seed} {index}"), tmp_path)
        if wrong:
            failures.append(f"{index}: {wrong}")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures[:12])
    assert not list(tmp_path.rglob(RAN))
