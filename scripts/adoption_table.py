"""Compare published models with themselves after `recollect.lm.adopt`, and print the table.

    python scripts/adoption_table.py            measure, and write results/adoption/errors.json
    python scripts/adoption_table.py --read     print the table of the stored results

Each class of transformers is made tiny with random weights, and `rc.testing.check_family` compares
it with itself in every mode. Errors are the largest difference of logits over the largest logit.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "results" / "adoption" / "errors.json"
COLUMNS = {
    "Gradients are those of the original": "gradients",
    "A prompt and tokens one by one equal the whole sequence": "token by token",
    "A batch padded on the left equals each sequence alone": "padded on the left",
    "A prompt padded on the right and then continued equals each sequence alone": (
        "padded on the right, continued"
    ),
    "Padded pieces through one cache equal each sequence alone": "padded pieces",
    "Documents packed in one sequence equal each document alone": "packed documents",
    "Prompt lookup generates the tokens of greedy search": "prompt lookup",
    "Assisted generation generates the tokens of greedy search": "assisted",
}
"""Names of checks, and their columns. The first is compared with the original only."""


def main(arguments: list[str] | None = None) -> int:
    """Measure or read, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--read", action="store_true", help="print the stored table")
    if not parser.parse_args(arguments).read:
        STORED.parent.mkdir(exist_ok=True)
        STORED.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(STORED.read_text(encoding="utf-8"))))
    return 0


def measure() -> dict[str, Any]:
    """Return the errors of all classes by family, class and check."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers
    from tests.lm.adoption.models import FAMILIES, IGNORE_DOCUMENTS, OWN_CACHES, make_model

    import recollect as rc
    import recollect.lm

    families = {family.name: family for family in rc.lm.families()}
    results: dict[str, Any] = {}
    for kind in [*(kind for classes in FAMILIES.values() for kind in classes), *OWN_CACHES]:
        name = rc.lm.adopt(make_model(kind)).adopted[0].family
        assert name is not None
        report = rc.testing.check_family(
            families[name],
            lambda kind=kind: make_model(kind),  # type: ignore[misc]
            knows_documents=kind not in IGNORE_DOCUMENTS,
            exchanges_caches=kind != "recurrent_gemma",
        )
        model = type(report.adoption.model).__name__
        results.setdefault(name, {})[model] = {
            check: [_plain(x) for x in pair] for check, pair in report.errors.items()
        }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "device": "cpu",
        "python": platform.python_version(),
        **versions,
        "commit": commit.stdout.strip(),
        "errors": results,
    }


def _plain(error: float | str | None) -> float | str | None:
    """Return a value that JSON has: texts for infinity and for exceptions."""
    if isinstance(error, float) and math.isinf(error):
        return "other tokens"
    if not isinstance(error, str):
        return error
    if "has no attribute 'cache'" in error:
        return "no cache"  # outputs of RecurrentGemma
    return "refused" if "Value" in error else "raises"


def table(stored: dict[str, Any]) -> str:
    """Return the table: for each check the error of the original, then of the adopted model."""
    lines = [
        "| class | outputs | " + " | ".join(COLUMNS.values()) + " |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    first = "An adopted model computes what the original computes"
    for classes in stored["errors"].values():
        for name, errors in classes.items():
            cells = [_number(errors[first][0])]
            for check in COLUMNS:
                adopted, original = errors.get(check, ("–", None))
                cells.append(_cell(original, adopted))
            name = name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(original: float | str | None, adopted: float | str) -> str:
    return _number(adopted) if original is None else f"{_number(original)} → {_number(adopted)}"


def _number(error: float | str) -> str:
    if isinstance(error, str):
        return error
    return "equal" if error == 0 else f"{error:.0e}"


if __name__ == "__main__":
    raise SystemExit(main())
