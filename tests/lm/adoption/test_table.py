"""The table of docs/adopt.md against the stored results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from tests.lm.adoption.models import FAMILIES, OWN_CACHES

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "adoption_table.py"))


def test_the_page_has_the_stored_table() -> None:
    stored = json.loads(SCRIPT["STORED"].read_text(encoding="utf-8"))
    assert SCRIPT["table"](stored) in (ROOT / "docs" / "adopt.md").read_text(encoding="utf-8")
    num_classes = sum(len(classes) for classes in stored["errors"].values())
    assert num_classes == sum(len(specs) for specs in FAMILIES.values()) + len(OWN_CACHES)
