"""Checkpoints in megatron-core's distributed format: find, read, write, keep."""
