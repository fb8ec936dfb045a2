"""relax: train language models on preference pairs (DPO policies and reward models) on megatron-core."""
