"""Speed and memory, measured side by side in one run."""

from recollect.bench.harness import BenchResult, Case, Ceiling, Timing, run

__all__ = ["BenchResult", "Case", "Ceiling", "Timing", "run"]
