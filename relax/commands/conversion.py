"""What `relax.convert` does: name the two sides, stream one into the other or compare them, and tell what came of it."""

import argparse

import torch
from tqdm import tqdm

from relax.backend import parallel
from relax.backend.checkpoint.loading import CheckpointInfo
from relax.backend.device import peak_memory_gib
from relax.backend.model.families import read_hf_config
from relax.backend.weights.export import export_hf
from relax.backend.weights.streaming import StreamedModel, differences, read_hugging_face, read_megatron, save_megatron
from relax.backend.weights.tensor_files import TensorFiles
from relax.backend.weights.weight_table import SCORE
from relax.errors import UserError
from relax.objectives.base import Head
from relax.training.weight_source import check_vocabulary_rows, find_weights, head_of, recorded_text

CPU = torch.device("cpu")


def convert(args: argparse.Namespace) -> None:
    """Run the command. Raises UserError."""
    parallel.initialize(parallel.ParallelConfig(), device=CPU, seed=0)
    {"hf-to-mcore": _to_megatron, "mcore-to-hf": _to_hugging_face, "verify": _verify}[args.command](args)
    parallel.shutdown()


def _to_megatron(args: argparse.Namespace) -> None:
    source = TensorFiles(args.hf_checkpoint)
    head: Head = "scalar" if SCORE in source else "lm"
    model = _model(args, head=head, kept=source.dtype)
    read_hugging_face(model, source)
    _show_progress(model, "hf-to-mcore")
    save_megatron(model, args.save, run={"head": head, "converted_from": str(args.hf_checkpoint)})
    _tell(model, f"{args.save} is for --load with --finetune, and for --ref-load")


def _to_hugging_face(args: argparse.Namespace) -> None:
    info = find_weights(args.load, step=args.ckpt_step, flag="--load")
    model = _model(args, head=head_of(info), kept=info.dtype)
    _read_megatron(model, info)
    _show_progress(model, "mcore-to-hf")
    export_hf(
        [model],
        model.hf_config,
        source=args.hf_checkpoint,
        output=args.save,
        chat_template=recorded_text(info, "chat_template"),
        loss_type=info.run.get("loss_type"),
        step=info.step or None,
    )
    _tell(model, f"{args.save} is for transformers, and for --hf-checkpoint")


def _verify(args: argparse.Namespace) -> None:
    source = TensorFiles(args.hf_checkpoint)
    info = find_weights(args.load, step=args.ckpt_step, flag="--load")
    model = _model(args, head=head_of(info), kept=torch.promote_types(source.dtype, info.dtype))
    _read_megatron(model, info)
    _show_progress(model, "verify")
    found = dict(differences(model, source))
    worst = max(found, key=lambda name: found[name])
    unequal = sum(difference > 0 for difference in found.values())
    text = f"{len(found)} tensors compared in {_name(model)}, worst difference {found[worst]:g} in {worst}"
    if unequal:
        raise UserError(f"--hf-checkpoint {args.hf_checkpoint} and {info.where} differ in {unequal} tensors: {text}")
    print(f"equal: {text}")


def _model(args: argparse.Namespace, *, head: Head, kept: torch.dtype) -> StreamedModel:
    """The model of --hf-checkpoint, in --dtype, else in the dtype that keeps every bit."""
    dtype: torch.dtype = getattr(torch, args.dtype) if args.dtype else kept
    return StreamedModel(read_hf_config(args.hf_checkpoint), head=head, dtype=dtype)


def _read_megatron(model: StreamedModel, info: CheckpointInfo) -> None:
    check_vocabulary_rows(model.hf_config, info)
    read_megatron(model, info)


def _show_progress(model: StreamedModel, title: str) -> None:
    """A bar on a terminal, by parameters read."""
    read, bar = model.read, tqdm(total=len(list(model.parameters())), desc=title, unit="tensor", disable=None)

    def watched(name: str) -> torch.Tensor:
        bar.update()
        return read(name)

    model.read = watched


def _tell(model: StreamedModel, purpose: str) -> None:
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{size:.1f} M parameters in {_name(model)}, peak memory {peak_memory_gib(CPU):.2f} GiB; {purpose}")


def _name(model: StreamedModel) -> str:
    return str(model.config.params_dtype).removeprefix("torch.")
