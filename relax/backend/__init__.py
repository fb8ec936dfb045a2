"""The only place that imports megatron-core: model, layout, engine, weights and checkpoints."""

import warnings

# megatron-core speaks to its developers while it loads and runs: about apex and Transformer Engine, which are optional here,
# and about its own and torch's renamed functions. None of it is for someone who trains a model.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
