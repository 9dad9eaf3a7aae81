"""Read a long prompt once, save the state, and answer several questions from it.

    python examples/continue_from_cache.py --model runs/my-text/model --text manual.txt

The file contains the state of every memory. For a recurrent recipe its size does not depend on the
length of the prompt. Loading it runs no code, and another model refuses it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

import recollect as rc
from recollect.lm.data.tokenizers import byte_tokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of a saved model; by default an untrained model")
parser.add_argument("--text", help="UTF-8 file with the prompt; by default this example")
parser.add_argument("--ask", action="append", help="question after the prompt; repeatable")
parser.add_argument("--tokens", type=int, default=100)
parser.add_argument("--smoke", action="store_true", help="a few tokens")
arguments = parser.parse_args()
questions = arguments.ask or ["\nFirst,", "\nIn the end,"]
tokens = 4 if arguments.smoke else arguments.tokens

if arguments.model:
    model = rc.lm.RecollectForCausalLM.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
else:
    model = rc.lm.RecollectForCausalLM(
        rc.lm.RecollectConfig.from_recipes(
            "gated_delta_net",
            vocab_size=257,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    ).eval()
    tokenizer = byte_tokenizer()
    print("no --model: this one has random weights, and what it writes means nothing")


def encoded(text: str) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt")["input_ids"]


text = Path(arguments.text or __file__).read_text(encoding="utf-8")
text = text[:200] if arguments.smoke else text

with tempfile.TemporaryDirectory() as folder:
    path = rc.lm.CachedPrompt.prefill(model, encoded(text)).save(
        f"{folder}/prompt.safetensors", model
    )
    print(f"read {len(text)} characters, saved {path.stat().st_size:,} bytes")

    # Later, in another process: the model continues without reading the text again.
    prompt = rc.lm.CachedPrompt.load(path, model)
    for question in questions:
        inputs = prompt.generate_kwargs(encoded(question))
        made = model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=True,
            generator=torch.Generator().manual_seed(0),
            pad_token_id=tokenizer.pad_token_id,
        )
        new = made[0, inputs["input_ids"].shape[1] :]
        print(f"{question!r} -> {tokenizer.decode(new, skip_special_tokens=True)!r}")
