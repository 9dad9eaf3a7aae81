"""Print the megabytes that autograd saves for a layer of each preset, or of those in the arguments.

One sequence of 2,048 tokens, width 256, four heads, float32. Parameters and inputs do not count.
"""

import sys

import torch
from torch.autograd.graph import saved_tensors_hooks

import recollect as rc

TOKENS, WIDTH, HEADS = 2048, 256, 4


def saved_megabytes(name: str) -> float:
    """Return the size of the tensors that a forward pass saves for its backward pass."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(WIDTH, HEADS)
    x = torch.randn(1, TOKENS, WIDTH)
    excluded = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    storages: dict[int, int] = {}
    saved = []  # alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            storages[storage.data_ptr()] = storage.nbytes()
            saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storages.values()) / 1e6


for preset in sys.argv[1:] or rc.zoo.names():
    print(f"{preset:28s} {saved_megabytes(preset):8.1f}", flush=True)
