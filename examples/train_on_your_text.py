"""Train a language model of 3 million parameters on your text file.

    python examples/train_on_your_text.py --text mine.txt

This takes about six minutes on one thread of a CPU. With --smoke, it trains for seconds, on the
source of this example.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import recollect as rc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", help="a UTF-8 text file")
parser.add_argument("--out", default="runs/my-text", help="folder of the run")
parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
arguments = parser.parse_args()
if arguments.text is None and not arguments.smoke:
    parser.error("give --text FILE, or --smoke for a few steps on this example's own source")

with tempfile.TemporaryDirectory() as scratch:
    size = {"width": 16, "depth": 1, "heads": 2} if arguments.smoke else {"parameters": 3_000_000}
    plan = rc.lm.TrainPlan.from_dict(
        {
            "model": {"recipe": "gated_delta_net", **size},
            "data": {
                "train": arguments.text or __file__,
                "heldout_share": 0.05,
                "context": 32 if arguments.smoke else 512,
            },
            "optimizer": {"lr": 2e-3, "batch": 4, "steps": 3 if arguments.smoke else 500},
            "run": {
                "out": scratch if arguments.smoke else arguments.out,
                "eval_every": 0 if arguments.smoke else 100,
                "save_every": 100,
            },
        }
    )

    class PrintProgress(rc.lm.TrainObserver):
        def on_progress(self, progress: rc.lm.Progress) -> None:
            if progress.step % 10 == 0 and progress.loss is not None:
                print(
                    f"step {progress.step}/{progress.steps}  loss {progress.loss:.3f}  "
                    f"{progress.tokens_per_second:,.0f} tokens/s"
                )

    # Repeat the command to continue a run that was stopped.
    begun = Path(plan.run.out, "plan.json").exists()
    result = rc.lm.train(plan, resume=begun, observer=PrintProgress())
    print(f"held-out bits per byte: {result.heldout:.3f}; model: {result.folder}")

    prompt = torch.tensor([list(Path(__file__).read_bytes()[:20])])
    written = result.model.eval().generate(
        prompt, max_new_tokens=20, do_sample=False, pad_token_id=256
    )
    print(bytes(token for token in written[0].tolist() if token < 256).decode(errors="replace"))
