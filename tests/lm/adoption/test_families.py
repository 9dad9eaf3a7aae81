"""Each class of transformers that a family adopts, against the original in every mode."""

from __future__ import annotations

import inspect

import pytest
from tests.lm.adoption.models import FAMILIES, IGNORE_DOCUMENTS, family_of, make_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import recollect as rc
import recollect.lm

CLASSES = [
    pytest.param(name, marks=(pytest.mark.slow,) if i > 0 else ())
    for specs in FAMILIES.values()
    for i, name in enumerate(specs)
]


@pytest.mark.parametrize("name", CLASSES)
def test_an_adopted_model_equals_the_original(name: str) -> None:
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {name}")
    family = next(family for family in rc.lm.families() if family.name == family_of(name))
    knows_documents = name not in IGNORE_DOCUMENTS
    report = rc.testing.check_family(
        family, lambda: make_model(name), knows_documents=knows_documents
    )
    assert not report.adoption.unchanged
    is_old = "cache_params" in inspect.signature(make_model(name).forward).parameters
    assert len(report.errors) == 16 - (not knows_documents) - 2 * is_old
