"""Real NCCL on one GPU: every failure made, and what supervisor says of it; over gloo where there is no GPU."""
