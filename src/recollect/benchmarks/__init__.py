"""Measurements of speed and memory: all implementations in one run."""

from recollect.benchmarks.harness import run
from recollect.benchmarks.results import BenchResult, Case, Ceiling, Timing

__all__ = ["BenchResult", "Case", "Ceiling", "Timing", "run"]
