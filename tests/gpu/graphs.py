"""Decoding and training on the pretended device, with recorded and replayed graphs.

``python -m tests.gpu.graphs decode NAME...`` prints, for each system, the distance of replayed
tokens and of the final state in float64 from the layer on the CPU, the number of graphs, and the
requests of a replayed token to the host. ``... train NAME...`` records one training step of a
block, replays it with other tokens, and prints the distance of its weights from those of single
steps. A separate process, like `tests.gpu.measure`.
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
"""Compositions with short segments, inner batches and windows that do not divide each other."""


def module_of(name: str) -> nn.Module:
    """Return the layer of a preset, or a composition of this file."""
    if name in COMPOSED:
        return rc.blocks.build(COMPOSED[name], WIDTH, 2)
    return rc.zoo.get(name).build(d_model=WIDTH, num_heads=2)


def model_of(name: str) -> nn.Module:
    """Return a language model of that layer and another one."""
    config = rc.lm.RecollectConfig.from_recipes(
        {"first": COMPOSED.get(name, name), "second": "gated_delta_net"},
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return rc.lm.RecollectForCausalLM(config)


def stepped(module: nn.Module, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return the outputs of a call of the module."""
    if isinstance(module, rc.lm.RecollectForCausalLM):
        out = module(x, cache=state, use_cache=True)
        return out.logits, rc.lm.cache_of(out)
    return module(x, state)


@torch.no_grad()
def decoded(name: str) -> dict[str, object]:
    """Return the results of a system, or for ``lm:NAME`` of its language model."""
    torch.manual_seed(0)
    kind, _, inner = name.rpartition(":")
    cpu = (model_of if kind else module_of)(inner).double().eval()
    moved = pretend.put_module(cpu)

    def random_tokens(tokens: int) -> Tensor:
        return torch.randint(WIDTH, (2, tokens)) if kind else torch.randn(2, tokens, WIDTH).double()

    slots = None
    try:
        rc.StaticDecoder(cpu, stepped(cpu, random_tokens(1), None)[1])
    except ValueError as error:
        if "max_cache_len=" not in str(error):
            return {"name": name, "refused": str(error)}
        slots = PROMPT + SLOTS
    x = random_tokens(PROMPT)
    with pretend.counted():
        _, state = stepped(moved, pretend.put(x), None)
        try:
            decoder = rc.StaticDecoder(moved, state, max_cache_len=slots)
        except ValueError as error:
            return {"name": name, "refused": str(error)}
        _, cpu_state = stepped(cpu, x, None)
        max_error, launches = 0.0, 0
        more = decoder.warmup_tokens + 2 * decoder.period + MORE if slots is None else SLOTS - 3
        for _ in range(more):
            x = random_tokens(1)
            y, cpu_state = stepped(cpu, x, cpu_state)
            with pretend.counted() as counts:
                try:
                    out = decoder(pretend.put(x))
                except ValueError as error:
                    return {"name": name, "refused": str(error)}
            launches = counts.launches
            max_error = max(max_error, distance(pretend.host(out), y))
        later = decoder.state
        pairs = zip(*(getattr(s, "states", [s]) for s in (later, cpu_state)), strict=True)
        state_errors = [
            distance(pretend.host(one.to_dict()[part]), number)
            for one, other in pairs
            for part, number in other.to_dict().items()
            if number.numel() and part != "recipe_id"
        ]
        # From here the module continues.
        y, _ = stepped(cpu, x, cpu_state)
        max_error = max(
            max_error, distance(pretend.host(stepped(moved, pretend.put(x), later)[0]), y)
        )
    return {
        "name": name,
        "decoded": max_error,
        "state": max(state_errors, default=0.0),
        "places": [decoder.period, decoder.num_recorded],
        "launches": launches,
    }


def trained(name: str) -> dict[str, object]:
    """Record a training step, replay it with other tokens, and compare with single steps."""
    torch.manual_seed(0)
    block = Block(module_of(name), 2 * WIDTH).double()
    single = copy.deepcopy(block)
    moved = pretend.put_module(block)
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
        step(moved, x, target)  # constants are built
        loss, repeated = pretend.record(lambda: step(moved, x, target))
        losses = []
        for n in (2, 3):
            x.copy_(pretend.put(batches[n]))
            target.copy_(pretend.put(targets[n]))
            repeated()
            losses.append(float(pretend.host(loss)))
    references = [float(step(single, batches[n], targets[n])) for n in (0, 0, 2, 3)]
    errors = [
        distance(pretend.host(a), b)
        for a, b in zip(moved.parameters(), single.parameters(), strict=True)
    ]
    loss_error = max(abs(a - b) / b for a, b in zip(losses, references[2:], strict=True))
    return {"name": name, "weights": max(errors), "loss": loss_error}


def main(kind: str, *names: str) -> None:
    """Print results of the named systems."""
    warnings.simplefilter("ignore")
    static.graph_recorder = lambda device: pretend.record
    for name in names:
        print(json.dumps((decoded if kind == "decode" else trained)(name)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
