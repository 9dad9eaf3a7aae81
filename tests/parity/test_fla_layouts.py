"""Layouts of flash-linear-attention against that package, if it is installed.

It registers its models at transformers under names such as ``mamba``, so it runs in a separate
process. Its kernels need a GPU; its modules can be created, saved and loaded without one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.lm.conversion.published import FAMILIES, make, tensor_shapes

import recollect as rc
import recollect.lm
from recollect.lm.conversion.convert import LAYOUTS

pytestmark = pytest.mark.slow

if importlib.util.find_spec("fla") is None:
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)

SAVE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import fla.models
from transformers import AutoConfig, AutoModelForCausalLM
for model_type, options in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options))
    model.save_pretrained(f"{sys.argv[2]}/{model_type}")
"""
LOAD = """
import sys, warnings
warnings.simplefilter("ignore")
import fla.models
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys")), (folder, info)
    model.save_pretrained(folder + "/again")
"""


# In Triton's interpreter; the first import chooses it.
COMPUTE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.gpu import interpreter
import torch, warnings
warnings.simplefilter("ignore")
import fla.models
from transformers import AutoConfig, AutoModelForCausalLM
from tests.lm.conversion.published import FAMILIES, forward, make
from tests.lm.conversion.test_conversion import VARIANTS
interpreter.mend("fla")
ids = torch.randint(19, (9,), generator=torch.Generator().manual_seed(1))
for model_type, changes in VARIANTS:
    config, state = make(model_type, **changes, num_hidden_layers=2)
    options = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).eval()
    model.load_state_dict(state, strict=not config["tie_word_embeddings"])
    model.tie_weights()
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    expected = forward(ids, state, config, FAMILIES[model_type][1])
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < 2e-5, (model_type, changes, error)
"""


def options_of(model_type: str) -> dict[str, Any]:
    options = dict(make(model_type)[0])
    del options["model_type"]
    return options


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_their_models_convert_and_ours_load_there(tmp_path: Path) -> None:
    """Their names, shapes and options are those of our tests, and both directions load."""
    run(SAVE, json.dumps({name: options_of(name) for name in FAMILIES}), str(tmp_path))
    for model_type in FAMILIES:
        source = tmp_path / model_type
        state = load_file(source / "model.safetensors")
        config = {**make(model_type)[0], "model_type": model_type}
        shapes = {name: tuple(x.shape) for name, x in state.items()}
        assert shapes == tensor_shapes(model_type, config), model_type
        ours = rc.lm.convert(source, tmp_path / f"{model_type}-ours")
        rc.lm.convert(ours, tmp_path / f"{model_type}-back", to=model_type)
    backs = [tmp_path / f"{model_type}-back" for model_type in FAMILIES]
    run(LOAD, *map(str, backs))
    for model_type, back in zip(FAMILIES, backs, strict=True):
        initial = load_file(tmp_path / model_type / "model.safetensors")
        later = load_file(back / "again" / "model.safetensors")
        assert initial.keys() == later.keys()
        assert all(torch.equal(x, later[name]) for name, x in initial.items()), model_type
        configs = [
            json.loads((folder / "config.json").read_text())
            for folder in (tmp_path / model_type, back / "again")
        ]
        assert configs[0] == configs[1], model_type


def test_their_kernels_compute_the_equations_of_our_tests() -> None:
    """The largest error is 2e-6, which is rounding to float32."""
    run(COMPUTE, str(Path(__file__).parents[2]))


def test_defaults_are_theirs(tmp_path: Path) -> None:
    """Options that a ``config.json`` leaves out have the defaults of that package."""
    script = """
import json, warnings, sys
warnings.simplefilter("ignore")
import fla.models
from transformers import AutoConfig
names = json.loads(sys.argv[1])
data = {name: AutoConfig.for_model(name).to_dict() for name in names}
open(sys.argv[2], "w").write(json.dumps(data))
"""
    run(script, json.dumps([*FAMILIES]), str(tmp_path / "defaults.json"))
    defaults = json.loads((tmp_path / "defaults.json").read_text())
    for model_type in FAMILIES:
        layout = LAYOUTS[model_type]
        for name, value in layout.defaults.items():
            theirs = defaults[model_type].get(name, value)
            # HGRN2's own configuration derives the number of heads.
            assert theirs == value or (model_type, name) == ("hgrn2", "num_heads"), name
        for name, value in layout.required.items():
            if name != "use_lower_bound":
                assert defaults[model_type].get(name, value) == value, (model_type, name)
