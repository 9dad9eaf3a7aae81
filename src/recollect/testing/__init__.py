"""Contract suites for members, presets, engines and families of any package.

The library runs these checks on its own members. They need torch only (`check_family` also needs
transformers), take seconds, and raise AssertionError with one sentence that names the member,
preset or engine and the false claim.

Examples:
    >>> rc.testing.check_member(rc.bias.L2, count=1).member
    'bias.L2'
"""

from __future__ import annotations

from recollect.testing.engines import check_engine
from recollect.testing.families import FamilyReport, check_family
from recollect.testing.members import Check, MemberReport, check_member
from recollect.testing.presets import check_preset

__all__ = [
    "Check",
    "FamilyReport",
    "MemberReport",
    "check_engine",
    "check_family",
    "check_member",
    "check_preset",
]
