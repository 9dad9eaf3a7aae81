"""Generate text with a saved model: greedy, sampled and with beams, for several prompts at once.

    python examples/generate.py --model runs/my-text/model --prompt "The memory" --prompt "A"

``recollect generate MODEL --prompt TEXT`` generates from one prompt, and streams the text.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recollect as rc
from recollect.lm.data.tokenizers import byte_tokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of a saved model; by default an untrained model")
parser.add_argument("--prompt", action="append", help="text to continue; repeatable")
parser.add_argument("--tokens", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--smoke", action="store_true", help="a few tokens")
arguments = parser.parse_args()
prompts = arguments.prompt or ["The memory", "A"]
tokens = 4 if arguments.smoke else arguments.tokens

if arguments.model:
    # The import of recollect.lm registered the model's type, so no remote code is needed.
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
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

# Prompts of different lengths in one batch: left padding does not change results.
batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
batch.pop("token_type_ids", None)
how = {**batch, "max_new_tokens": tokens, "pad_token_id": tokenizer.pad_token_id}

greedy = model.generate(**how, do_sample=False)
sampled = model.generate(
    **how,
    do_sample=True,
    temperature=0.8,
    top_p=0.95,
    generator=torch.Generator().manual_seed(arguments.seed),  # reproducible text
)
beams = model.generate(**how, do_sample=False, num_beams=4)

for name, made in (("greedy", greedy), ("sampled", sampled), ("beams", beams)):
    for text in tokenizer.batch_decode(made, skip_special_tokens=True):
        print(f"{name}: {text!r}")

with torch.no_grad():
    cache = rc.lm.cache_of(model(batch["input_ids"], attention_mask=batch["attention_mask"]))
print(cache, "growing with the text" if model.has_growing_cache else "however long the text")
