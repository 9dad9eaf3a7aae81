"""Continue the training of a saved model on another text, with a new schedule.

    python examples/continue_training.py --model runs/my-text/model --text more.txt

To continue a run that was stopped, use ``recollect train CONFIG --resume`` instead. It also
restores the optimizer and the position in the data.
"""

from __future__ import annotations

import argparse
import tempfile

import recollect as rc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of a saved model; by default a tiny new model")
parser.add_argument("--text", help="UTF-8 text file; by default this example")
parser.add_argument("--out", default="runs/continued", help="folder of the run")
parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
arguments = parser.parse_args()


def plan(model: dict, out: str, *, steps: int, lr: float) -> rc.lm.TrainPlan:
    return rc.lm.TrainPlan.from_dict(
        {
            "model": model,
            "data": {
                "train": arguments.text or __file__,
                "context": 32 if arguments.smoke else 512,
            },
            "optimizer": {"steps": steps, "lr": lr, "batch": 2},
            "run": {"out": out, "save_every": 0, "log_every": 1},
        }
    )


with tempfile.TemporaryDirectory() as scratch:
    start = arguments.model
    if start is None:
        tiny = {"recipe": "gated_delta_net", "width": 16, "depth": 1, "heads": 2}
        first = rc.lm.train(plan(tiny, f"{scratch}/first", steps=3, lr=1e-2))
        print(f"first: loss {first.loss:.3f}")
        start = str(first.folder)
    # A lower peak than in the first training, because the model is trained already.
    steps, out = (3, f"{scratch}/second") if arguments.smoke else (200, arguments.out)
    second = rc.lm.train(plan({"start": start}, out, steps=steps, lr=5e-4))
    print(f"continued from {start}: loss {second.loss:.3f}")
