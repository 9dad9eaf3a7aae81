"""One model on several processes: replicas, sharded weights, layers divided by heads.

PyTorch does the work (`fully_shard`, `parallelize_module`, `DeviceMesh` and
`torch.distributed.checkpoint`). This package adapts it to memory layers and to checkpoints.
"""
