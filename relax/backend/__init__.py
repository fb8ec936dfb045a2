"""The only place that imports megatron-core: model, layout, engine, weights and checkpoints."""

import contextlib
import functools
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Tensors of 2 MB and more on a CPU in huge pages: a page fault for 512 small ones, and products that need not wait for the page
# table. torch reads this when the process makes its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# megatron-core speaks to its developers while it loads and runs: about apex and Transformer Engine, which are optional here,
# and about its own and torch's renamed functions. None of it is for someone who trains a model.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")


@contextlib.contextmanager
def _what_training_needs() -> Iterator[None]:
    """Keep megatron-core's import from loading seconds of what no run uses: torch's compiler before it compiles anything, and
    the trackers of its own training loop."""
    modules: dict[str, Any] = sys.modules
    compile_now, unused = torch.compile, [name for name in ("wandb", "tensorboard") if name not in modules]

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later  # type: ignore[assignment]  # torch's has overloads
    modules |= dict.fromkeys(unused)  # None: as if it were not installed
    try:
        yield
    finally:
        torch.compile = compile_now
        for name in unused:
            del modules[name]


with _what_training_needs():
    importlib.import_module("megatron.core.models.gpt")
gc.freeze()  # what importing made stays, and need not be walked by the collection that megatron asks for at each checkpoint
