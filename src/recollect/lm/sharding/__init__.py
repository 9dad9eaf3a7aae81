"""One model on several processes: replicas, shards of weights, layers divided by heads.

torch does it (`fully_shard`, `parallelize_module`, `DeviceMesh`, `torch.distributed.checkpoint`);
here is what it has to be told of our layers and of our checkpoints.
"""
