"""Replace attention in some layers of a Hugging Face decoder by a memory, and train the new parts.

    python examples/swap_attention.py --model meta-llama/Llama-3.2-1B --recipe gated_delta_net

By default the decoder is a tiny Llama with random weights.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import recollect as rc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="folder or hub name of a decoder")
parser.add_argument("--recipe", default="gated_delta_net", help="name of the zoo")
parser.add_argument("--layers", default="0,-1", help="indices, separated by commas")
parser.add_argument("--smoke", action="store_true", help="a few steps")
arguments = parser.parse_args()
torch.manual_seed(0)

if arguments.model:
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
else:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    print("no --model: this one has random weights, and is trained on random tokens")

layers = [int(index) for index in arguments.layers.split(",")]
print(rc.lm.replace_attention(model, arguments.recipe, layers))

# Train only the new parameters.
for name, weight in model.named_parameters():
    weight.requires_grad_(".layer." in name)
optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-3)
text = torch.randint(3, 64, (4, 16))
for step in range(2 if arguments.smoke else 50):
    loss = model(text, labels=text).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

model.eval()
out = model.generate(text[:1], max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
print(out.sequences[0].tolist())
print(rc.lm.cache_of(out).layers)  # states of replaced layers, keys and values of the others

# You save and load the decoder as any other. Its configuration lists the replaced layers:
#     model.save_pretrained("swapped")
#     model = transformers.AutoModelForCausalLM.from_pretrained("swapped")
