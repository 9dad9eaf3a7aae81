"""Decoding and training on the pretended device, where graphs are recorded and replayed.

``python -m tests.gpu.graphs decode NAME...`` prints, for each system, how far replayed tokens and
the state after them are in float64 from what the layer itself computes on the CPU, how many graphs
there are, and what a replayed token asks of the host. ``... train NAME...`` records one training
step of a block, replays it with other tokens, and prints how far its weights are from those of the
same steps taken one by one. A process of its own, as `tests.gpu.measure`.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from tests.gpu import pretend
from tests.gpu.passes import distance
from torch import Tensor, nn

import recollect as rc
from recollect.decoder import static
from recollect.layer.block import Block

WIDTH, PROMPT, MORE, SLOTS = 16, 7, 24, 40

_titans, NEAR = rc.zoo.get("titans").recipe, rc.zoo.get("sliding_window_attention").recipe
DEEP = replace(_titans, algorithm=replace(_titans.algorithm, batch_size=4))


def _attending(window: rc.context.Context) -> rc.Recipe:
    return replace(NEAR, context=replace(NEAR.context, restrictions=(window,)))


SINK = _attending(rc.context.SinkWindow(size=6, num_sinks=2))
NEAR = _attending(rc.context.Window(size=6, gated=False))
COMPOSED = {
    "mac": rc.blocks.MemoryAsContext(DEEP, "softmax_attention", segment=6, persistent=2),
    "mag": rc.blocks.MemoryAsGate(DEEP, SINK, persistent=2),
    "chain": rc.blocks.Sequential("gated_delta_net", NEAR),
    "beside attention": rc.blocks.Sequential("softmax_attention", DEEP),
    "boosted": rc.blocks.ResidualMemory("delta_net", "delta_net"),
}
"""Compositions whose segments, inner batches and windows are short and do not divide each other."""


def module_of(name: str) -> nn.Module:
    """The layer of a preset, or a composition of this file."""
    if name in COMPOSED:
        return rc.blocks.build(COMPOSED[name], WIDTH, 2)
    return rc.zoo.get(name).build(d_model=WIDTH, num_heads=2)


def model_of(name: str) -> nn.Module:
    """A language model of that layer and another one."""
    config = rc.lm.RecollectConfig.from_recipes(
        {"first": COMPOSED.get(name, name), "second": "gated_delta_net"},
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return rc.lm.RecollectForCausalLM(config)


def stepped(module: nn.Module, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """What calling the module gives."""
    if isinstance(module, rc.lm.RecollectForCausalLM):
        out = module(x, cache=state, use_cache=True)
        return out.logits, rc.lm.cache_of(out)
    return module(x, state)


@torch.no_grad()
def decoded(name: str) -> dict[str, object]:
    """What came of one system; of ``lm:NAME``, of a language model of it."""
    torch.manual_seed(0)
    kind, _, inner = name.rpartition(":")
    cpu = (model_of if kind else module_of)(inner).double().eval()
    there = pretend.put_module(cpu)

    def drawn(tokens: int) -> Tensor:
        return torch.randint(WIDTH, (2, tokens)) if kind else torch.randn(2, tokens, WIDTH).double()

    slots = None
    try:
        rc.StaticDecoder(cpu, stepped(cpu, drawn(1), None)[1])
    except ValueError as error:
        if "max_cache_len=" not in str(error):
            return {"name": name, "refused": str(error)}
        slots = PROMPT + SLOTS
    x = drawn(PROMPT)
    with pretend.counted():
        _, state = stepped(there, pretend.put(x), None)
        try:
            decoder = rc.StaticDecoder(there, state, max_cache_len=slots)
        except ValueError as error:
            return {"name": name, "refused": str(error)}
        _, cpu_state = stepped(cpu, x, None)
        far, launches = 0.0, 0
        more = decoder.warmup_tokens + 2 * decoder.period + MORE if slots is None else SLOTS - 3
        for _ in range(more):
            x = drawn(1)
            y, cpu_state = stepped(cpu, x, cpu_state)
            with pretend.counted() as counts:
                try:
                    out = decoder(pretend.put(x))
                except ValueError as error:
                    return {"name": name, "refused": str(error)}
            launches = counts.launches
            far = max(far, distance(pretend.host(out), y))
        later = decoder.state
        pairs = zip(*(getattr(s, "states", [s]) for s in (later, cpu_state)), strict=True)
        apart = [
            distance(pretend.host(one.to_dict()[part]), number)
            for one, other in pairs
            for part, number in other.to_dict().items()
            if number.numel() and part != "recipe_id"
        ]
        # From here the module itself goes on.
        y, _ = stepped(cpu, x, cpu_state)
        far = max(far, distance(pretend.host(stepped(there, pretend.put(x), later)[0]), y))
    return {
        "name": name,
        "decoded": far,
        "state": max(apart, default=0.0),
        "places": [decoder.period, decoder.num_recorded],
        "launches": launches,
    }


def trained(name: str) -> dict[str, object]:
    """A training step recorded, and replayed with other tokens, beside the steps themselves."""
    torch.manual_seed(0)
    block = Block(module_of(name), 2 * WIDTH).double()
    single = copy.deepcopy(block)
    there = pretend.put_module(block)
    batches, targets = torch.randn(2, 4, 2, 40, WIDTH).double()

    def step(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        y, _ = module(x, output_final_state=False)
        loss = (y - target).square().mean()
        parameters = [p for p in module.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                if g is not None:
                    p.sub_(g, alpha=0.1)
        return loss.detach()

    with pretend.counted():
        x, target = pretend.put(batches[0]), pretend.put(targets[0])
        step(there, x, target)  # what is made once is made
        loss, repeated = pretend.record(lambda: step(there, x, target))
        losses = []
        for n in (2, 3):
            x.copy_(pretend.put(batches[n]))
            target.copy_(pretend.put(targets[n]))
            repeated()
            losses.append(float(pretend.host(loss)))
    own = [float(step(single, batches[n], targets[n])) for n in (0, 0, 2, 3)]
    far = [
        distance(pretend.host(a), b)
        for a, b in zip(there.parameters(), single.parameters(), strict=True)
    ]
    apart = max(abs(a - b) / b for a, b in zip(losses, own[2:], strict=True))
    return {"name": name, "weights": max(far), "loss": apart}


def main(kind: str, *names: str) -> None:
    """Every system that is named."""
    warnings.simplefilter("ignore")
    static.graph_recorder = lambda device: pretend.record
    for name in names:
        print(json.dumps((decoded if kind == "decode" else trained)(name)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
