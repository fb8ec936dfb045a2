"""The only place that imports megatron-core: model, layout, engine, weights and checkpoints."""
