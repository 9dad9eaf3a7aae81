"""Use a saved model in `transformers.pipeline`, as any model of Hugging Face.

python examples/pipeline.py --model runs/my-text/model --prompt "The memory"
"""

from __future__ import annotations

import argparse
import tempfile

from transformers import pipeline

import recollect as rc
from recollect.lm.data.tokenizers import byte_tokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder of a saved model; by default an untrained model")
parser.add_argument("--prompt", default="The memory")
parser.add_argument("--tokens", type=int, default=100)
parser.add_argument("--smoke", action="store_true", help="a few tokens")
arguments = parser.parse_args()

with tempfile.TemporaryDirectory() as scratch:
    folder = arguments.model
    if folder is None:
        # A run saves the model and its tokenizer in one folder.
        folder = scratch
        config = rc.lm.RecollectConfig.from_recipes(
            ["gated_delta_net", "softmax_attention"],
            vocab_size=257,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        rc.lm.RecollectForCausalLM(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        print("no --model: this one has random weights, and what it writes means nothing")
    # The import of recollect.lm registered the model's type, so no remote code is needed.
    write = pipeline("text-generation", model=folder, tokenizer=folder)
    made = write(
        [arguments.prompt, f"{arguments.prompt} of"],
        batch_size=2,
        max_new_tokens=4 if arguments.smoke else arguments.tokens,
        do_sample=False,
    )
    for one in made:
        print(repr(one[0]["generated_text"]))
