"""Options that several commands share, and checks of their values.

The checks of names and files run before torch is imported, which takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.layer.options import LayerOptions
    from recollect.lm.training.plan import TrainPlan
    from recollect.recipe.recipe import Recipe

AnyDeviceOption = Annotated[
    str | None,
    typer.Option(help="Device: cpu, cuda, cuda:1 or mps. [default: a GPU if there is one]"),
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run.")]
DeviceOption = Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1 or mps.")]
ImportOption = Annotated[
    list[str],
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Module to import first, which registers members or presets; repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
KeyDimOption = Annotated[int | None, typer.Option(help="Key channels. [default: width/heads]")]
ModelFolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder of a saved model or of a run, or name of a model on the hub."
    ),
]
NewTokensOption = Annotated[
    int, typer.Option("--tokens", "--max-new-tokens", min=1, help="Largest number of new tokens.")
]
OutOption = Annotated[Path, typer.Option(help="Folder of the results.")]
TextsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Files (.txt, .jsonl, .parquet), folders or patterns with the text of the task text; "
        "repeatable. [default: the documentation of Python]"
    ),
]


def comma_list(text: str) -> list[str]:
    """Split a list that is separated by commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def named_list(text: str | None, option: str) -> list[str]:
    """Split the list of an option, which names at least one item if it is present."""
    names = [] if text is None else comma_list(text)
    if text is not None and not names:
        raise ValueError(f"{option} names nothing: give names separated by commas, or leave it out")
    return names


def positive(at_most: float) -> Callable[[float | None], float | None]:
    """Return an option's callback that checks 0 < value <= at_most; typer's ``min`` includes 0."""

    def check(value: float | None) -> float | None:
        if value is not None and not 0 < value <= at_most:
            raise typer.BadParameter(f"must be above 0 and at most {at_most:g}, not {value}")
        return value

    return check


def check_device(device: str) -> None:
    """Refuse a device that torch does not find."""
    if device != "cpu":
        from recollect.report.devices import resolve_device

        resolve_device(device, argument_name="--device")


def check_exists(path: Path) -> None:
    """Refuse a file that does not exist."""
    if not os.path.lexists(path):
        raise RecipeError(f"there is no file {path}")


def check_writable(out: Path) -> None:
    """Create the folder of a report before the work begins, and refuse one that is not writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to: {error.strerror}") from None


def check_models(names: Iterable[str]) -> None:
    """Refuse names that are not in the zoo, and recipe files that do not exist."""
    if "recollect.zoo" in sys.modules:  # modules of --import may have registered presets
        from recollect.zoo.preset import names as presets
        from recollect.zoo.preset import variants

        known = [*presets(), *presets(kind="hybrid"), *variants()]
    else:
        known = _zoo_names()
    for name in names:
        if _is_recipe_file(name):
            check_exists(Path(name))
        elif name.partition(":")[0] not in known:  # the zoo refuses unknown variants
            if "." in name or "/" in name:
                raise RecipeError(
                    f"{name} is neither .json nor .toml: a recipe is written in one of them"
                )
            near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "recollect zoo lists all"
            raise RecipeError(f"the zoo has no architecture named {name!r}; {hint}")


def load_model_spec(name: str) -> str | tuple[str, Recipe, LayerOptions]:
    """Return a name of the zoo, or label, recipe and options of a .json or .toml file.

    The file contains a recipe, or ``recipe`` and the ``options`` of its layer.
    """
    check_models([name])
    if not _is_recipe_file(name):
        return name
    from recollect.blocks.compositions import load_recipe_mixer

    mixer = load_recipe_mixer(Path(name))
    return Path(name).stem, mixer.recipe, mixer.options


def load_config(config: Path) -> TrainPlan:
    """Read the file of a run, and import the modules that it names."""
    check_exists(config)
    from recollect.lm.training.plan import load_plan
    from recollect.plugins import import_modules

    plan = load_plan(config)
    import_modules(plan.imports, folder=plan.import_dir, option="import")
    return plan


def _is_recipe_file(name: str) -> bool:
    return Path(name).suffix.lower() in (".json", ".toml")


def _zoo_names() -> list[str]:
    """Return the names of all presets and variants, from the decorators in the zoo's source."""
    return [
        f"{ast.literal_eval(call.args[0])}:published"
        if ast.unparse(call.func) == "published"
        else node.name
        for file in resources.files("recollect").joinpath("zoo").iterdir()
        if file.name.endswith(".py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call)
    ]
