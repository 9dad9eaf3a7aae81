"""Recover a tiny Llama whose attention was replaced: three seeds, each with and without matching.

    python results/distill/recover.py

The teacher copies texts of distinct symbols: a document is such a text, twice. Both of its layers
are replaced by gated_delta_net, and 300 optimizer steps follow. `results.json` has all numbers.
The loss is that of the second half of a document, which the first half determines.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import recollect as rc
import recollect.lm

BEGIN, SYMBOLS = "!", [chr(code) for code in range(48, 48 + 32)]
SHORTEST, LONGEST = 4, 12  # symbols of a text
CONTEXT = 2 * (SHORTEST + LONGEST) + 4  # two documents, with beginnings and ends
STEPS = 300


def text(draw: random.Random, rows: int) -> str:
    """Return two documents for each row, whose lengths together fill it."""
    documents: list[str] = []
    for _ in range(rows):
        first = draw.randint(SHORTEST, LONGEST)
        for size in (first, SHORTEST + LONGEST - first):
            documents.append(document(draw, size))
    return "\n".join(documents)


def document(draw: random.Random, size: int) -> str:
    """Return a text of distinct symbols, twice, after a symbol that begins it."""
    return BEGIN + 2 * "".join(draw.sample(SYMBOLS, size))


def batch(draw: random.Random, size: int) -> torch.Tensor:
    """Return documents of one length as tokens ``[size, 2n + 2]``, with their ends."""
    n = draw.randint(SHORTEST, LONGEST)
    return torch.tensor([[*document(draw, n).encode(), 256] for _ in range(size)])


def copy_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of the tokens that the tokens before them determine."""
    n = ids.shape[1] // 2
    logits = model(ids, use_cache=False).logits[:, n:-1]  # after the first repeated symbol
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, n + 1 :].flatten())


@torch.no_grad()
def heldout(model: Any) -> float:
    """Return the copy loss on texts that no training reads."""
    draw = random.Random(999)
    return sum(copy_loss(model.eval(), batch(draw, 64)).item() for _ in range(8)) / 8


def train_teacher(seed: int, folder: Path) -> LlamaForCausalLM:
    """Train a Llama of two layers on copies, then on whole documents too, and save it."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=256,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    model = LlamaForCausalLM(config)
    for steps, lr, is_whole in ((1300, 4e-3, False), (150, 1e-3, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, lr, total_steps=steps, pct_start=0.1
        )
        for _ in range(steps):
            ids = batch(draw, 32)
            loss = copy_loss(model.train(), ids)
            if is_whole:
                loss = loss + model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.save_pretrained(folder)
    return model


ONLY_FINE_TUNE = {"match_layers": 0, "match_logits": 0, "fine_tune": STEPS}
PLANS: dict[str, dict[str, Any]] = {
    "calibrate, match, fine-tune": {},
    "fine-tune": {"calibrate": False, "steps": ONLY_FINE_TUNE},
    "match, fine-tune": {"calibrate": False},
    "calibrate, fine-tune": {"steps": ONLY_FINE_TUNE},
}


def recover(folder: Path, seed: int, names: list[str]) -> dict[str, Any]:
    """Return the losses of a seed, by the name of the plan."""
    teacher = train_teacher(seed, folder / "teacher")
    (folder / "train.txt").write_text(text(random.Random(1000 + seed), 4800))
    (folder / "heldout.txt").write_text(text(random.Random(2000 + seed), 32))
    teacher_loss, rows = heldout(teacher), {}
    torch.manual_seed(seed)
    swapped = LlamaForCausalLM.from_pretrained(folder / "teacher")
    rc.lm.replace_attention(swapped, "gated_delta_net")
    swapped_loss = heldout(swapped)
    for name in names:
        plan = rc.lm.DistillPlan(
            teacher=str(folder / "teacher"),
            recipe="gated_delta_net",
            out=str(folder / name.replace(", ", "-")),
            data={
                "train": str(folder / "train.txt"),
                "heldout": str(folder / "heldout.txt"),
                "separator": "\n",
                "context": CONTEXT,
            },
            lr={"match_layers": 1e-2, "match_logits": 5e-3, "fine_tune": 5e-3},
            optimizer={"batch": 16, "weight_decay": 0.0},
            run={"seed": seed, "device": "cpu", "save_every": 0},
            **PLANS[name],
        )
        result = rc.lm.distill(plan)
        loss = heldout(result.model)
        rows[name] = {
            "loss": loss,
            "recovered": (swapped_loss - loss) / (swapped_loss - teacher_loss),
            "stages": [vars(stage) for stage in result.stages],
        }
        numbers = f"{teacher_loss:.3f}, {swapped_loss:.3f} → {loss:.3f}"
        share = f"{rows[name]['recovered']:.1%} recovered"
        print(f"seed {seed}, {name}: {numbers}, {share}", result, sep="\n", flush=True)
    return {"seed": seed, "teacher": teacher_loss, "swapped": swapped_loss, "plans": rows}


def main() -> None:
    """Run the seeds and write `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plans", type=int, default=len(PLANS), help="How many of the plans.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results.json")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(recover(Path(folder), seed, [*PLANS][: options.plans]))
        data = {"steps": STEPS, "torch": torch.__version__, "runs": runs}
        options.out.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
