"""Speed and memory, measured side by side in one run."""

from recollect.bench.harness import run
from recollect.bench.results import BenchResult, Case, Ceiling, Timing

__all__ = ["BenchResult", "Case", "Ceiling", "Timing", "run"]
