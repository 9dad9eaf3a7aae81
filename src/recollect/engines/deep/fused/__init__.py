"""The fused walk: a deep memory's inner batches and their reads as one CUDA kernel.

It runs where it is asked for by name (``engine="fused"``), on a CUDA device of compute capability
9.0, in bfloat16 products with float32 sums and states; a decoded token is one launch, in float32.
Elsewhere the batched path of the deep engine runs. See `docs/design/fused-kernel.md`.
"""
