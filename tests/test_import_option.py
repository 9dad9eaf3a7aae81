"""User members on the command line, imported only if an option names their module."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from tests.test_run_train import PLAN
from typer.testing import CliRunner, Result

from recollect import plugins as modules
from recollect.choices import member
from recollect.cli import COMMANDS, build
from recollect.plugins import import_modules
from recollect.zoo.preset import get

MODULE = '''
import recollect as rc


@rc.member
class {name}(rc.bias.Bias):
    """Aims half as far again as the value."""

    affine = (1.0, 1.5)

    def error(self, prediction, value, gates):
        return prediction - 1.5 * value
'''


class Place:
    """A folder with a user's module, a recipe of it, and a run that uses both."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        (folder / "away").mkdir()
        (folder / "my_biases.py").write_text(MODULE.format(name="Beyond"))
        (folder / "mine.toml").write_text('[bias]\nmember = "Beyond"\n')
        draw = random.Random(0)
        words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again"]
        text = "\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(150))
        (folder / "t.txt").write_text(text)
        monkeypatch.chdir(folder)
        self.forget()

    def forget(self) -> None:
        """Forget the module, as in a new process."""
        patch = self.monkeypatch
        mine = {n: m for n, m in member._REGISTRY.items() if m.__module__ != "my_biases"}
        patch.setattr(member, "_REGISTRY", mine)
        registry = sys.modules[get.__module__]
        patch.setattr(registry, "_PRESETS", dict(registry._PRESETS))
        patch.setattr(modules, "_imported", {})
        patch.setattr(sys, "path", [p for p in sys.path if p != str(self.folder)])
        patch.delitem(sys.modules, "my_biases", raising=False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(), list(arguments))


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr.count("\n") == 1 and len(result.stderr) < 400
    return result.stderr


def test_explain_imports_a_named_module(place: Place) -> None:
    output = refused(invoke("explain", "mine.toml"))
    assert "no member named 'Beyond' is registered" in output and "--import MODULE" in output
    assert "my_biases" not in sys.modules
    result = invoke("explain", "mine.toml", "--import", "my_biases")
    assert result.exit_code == 0, result.output
    place.forget()
    assert invoke("explain", "mine.toml", "--import", "my_biases.py").exit_code == 0


@pytest.mark.slow
def test_processes_of_a_comparison_import_the_module(place: Place) -> None:
    requested = [
        "compare",
        "--models",
        "mine.toml,linear_attention",
        "--text",
        "t.txt",
        "--jobs",
        "2",
    ]
    requested += ["--steps", "2", "--width", "16", "--depth", "1", "--heads", "2", "--json"]
    assert "--import MODULE" in refused(invoke(*requested))
    result = invoke(*requested, "--import", "my_biases")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [run["model"] for run in data["runs"]] == ["mine", "linear_attention"]
    assert data["processes"] == 2 and not data["failures"]


def test_run_names_its_modules_and_its_model_requires_them(place: Place) -> None:
    config = place.folder / "run.toml"
    run_file = PLAN.format(text=place.folder / "t.txt", out=place.folder / "out")
    run_file = run_file.replace("[model]", f'[model]\nrecipe = "{place.folder / "mine.toml"}"')
    config.write_text(run_file)
    # next to the file, for any folder of the command
    place.monkeypatch.chdir(place.folder / "away")
    assert "import = [...]" in refused(invoke("train", str(config)))
    config.write_text('import = ["my_biases"]\n' + run_file)
    result = invoke("train", str(config))
    assert result.exit_code == 0, result.output
    plan = json.loads((place.folder / "out" / "plan.json").read_text())
    assert plan["import"] == ["my_biases"]
    place.forget()
    on = invoke("train", str(config), "--resume", "--json")
    assert on.exit_code == 0, on.output

    place.forget()
    place.monkeypatch.chdir(place.folder)
    model = str(place.folder / "out" / "model")
    output = refused(invoke("generate", model, "--prompt", "the", "--tokens", "2"))
    assert "no member named 'Beyond' is registered" in output and "--import MODULE" in output
    assert "my_biases" not in sys.modules
    requested = ["generate", model, "--prompt", "the", "--tokens", "2", "--json"]
    built = invoke(*requested, "--import", "my_biases")
    assert built.exit_code == 0, built.output
    assert json.loads(built.stdout)["tokens"] == 2


def test_custom_preset_is_listed_and_compared(place: Place) -> None:
    lines = [
        "@rc.zoo.preset('Beyond', rule='W', references=(),",
        "    fidelity=rc.zoo.Fidelity(kind='exact', source='here'))",
        "def beyond_net():",
        '    "Beyond."',
        "    return rc.Recipe(bias=Beyond()), rc.LayerOptions()",
    ]
    path = place.folder / "my_biases.py"
    path.write_text(path.read_text() + "\n\n" + "\n".join(lines) + "\n")
    result = invoke("zoo", "--json", "--import", "my_biases")
    assert result.exit_code == 0, result.output
    assert "beyond_net" in [row["name"] for row in json.loads(result.stdout)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_every_command_takes_modules(command, place: Place) -> None:
    requested = {"explain": ["gla"], "train": ["run.toml"], "generate": ["nowhere"]}
    requested |= {"export": ["nowhere", "there"], "plan": ["run.toml"], "adopt": ["nowhere"]}
    requested["coordinates"] = ["run.toml"]
    requested |= {"look": ["nowhere", "text"]}
    requested["convert"] = ["nowhere", "there", "--attention-to", "gla", "--text", "text"]
    requested["compare"] = ["--models", "gla"]
    name = command.__name__
    output = refused(invoke(name, *requested.get(name, []), "--import", "absent_module"))
    assert output.startswith(f"recollect {name}: --import absent_module: there is no module")
    assert str(place.folder) in output


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("broken", "def f(:\n", "SyntaxError"),
        ("raising", "x = 1\nraise KeyError('why')\n", "line 2): KeyError: 'why'"),
        ("leaving", "raise SystemExit(3)\n", "SystemExit: 3"),
        ("needing", "import absent_too\n", "No module named 'absent_too'"),
        ("tomllib", "", "has the name of another module"),
        ("not a name", None, "names no module"),
        ("../evil", None, "names no module"),
        ("", None, "names no module"),
    ],
)
def test_error_of_a_module_that_cannot_be_imported(
    name: str, source: str | None, says: str, place: Place
) -> None:
    if source is not None:
        (place.folder / f"{name}.py").write_text(source)
    assert says in refused(invoke("explain", "gla", "--import", name))


def test_second_module_of_one_name_is_refused(place: Place) -> None:
    import_modules(["my_biases"], folder=place.folder)
    (place.folder / "away" / "my_biases.py").write_text("")
    with pytest.raises(ValueError, match="has the name of another module"):
        import_modules(["my_biases"], folder=place.folder / "away")


def test_import_in_a_file_is_a_list_of_names(place: Place) -> None:
    config = place.folder / "run.toml"
    config.write_text("import = 3\n[data]\ntrain = 't.txt'\n[optimizer]\nsteps = 1\n")
    assert "import must be a list of strings, not 3" in refused(invoke("train", str(config)))
