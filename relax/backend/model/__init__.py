"""The model: families, layout of a micro-batch, layers, heads."""
