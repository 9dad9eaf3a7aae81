"""What `recollect bench` times: named suites of cases over the public functions."""

from recollect.benchmarks.suites.registry import (
    SUITES,
    Shape,
    Suite,
    chosen_cases,
    document,
    ratios,
)

__all__ = ["SUITES", "Shape", "Suite", "chosen_cases", "document", "ratios"]
