"""What commands do besides training, below their flags: plan without a GPU, score pairs, convert checkpoints."""
