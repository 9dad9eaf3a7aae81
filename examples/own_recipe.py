"""Train the recipe in own_recipe.toml, and print the problem that it solves.

python examples/own_recipe.py --text mine.txt
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import recollect as rc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", help="a UTF-8 text file")
parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
arguments = parser.parse_args()
if arguments.text is None and not arguments.smoke:
    parser.error("give --text FILE, or --smoke for a few steps on this example's own source")

path = Path(__file__).with_name("own_recipe.toml")
print(rc.explain(rc.Recipe.from_dict(tomllib.loads(path.read_text())["model"]["recipe"])))

plan = rc.lm.load_plan(path)
plan = replace(plan, data=replace(plan.data, train=(arguments.text or __file__,)))
with tempfile.TemporaryDirectory() as scratch:
    if arguments.smoke:
        small = {"width": 16, "depth": 1, "heads": 2, "parameters": None}
        plan = replace(
            plan,
            model=replace(plan.model, **small),
            data=replace(plan.data, context=32),
            optimizer=replace(plan.optimizer, steps=3, tokens=None),
            run=replace(plan.run, out=scratch, save_every=0, eval_every=0),
        )
    begun = Path(plan.run.out, "plan.json").exists()
    result = rc.lm.train(plan, resume=begun)  # a second call continues the run
print(f"held-out bits per byte: {result.heldout:.3f}")
