"""What a training run is made of, put together in the order in which things can fail: flags, checkpoint, data, then weights.

Everything that decides a number (order, packing, head, reference) is a function of flags, files and the step, so a resumed
run needs the step alone.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relax.backend import indexed
from relax.backend.checkpoint.loading import CheckpointStore, find_checkpoint
from relax.backend.device import is_main_rank, peak_tflops, select_device
from relax.backend.engine import Batch, Engine
from relax.backend.model.families import model_shape, read_hf_config
from relax.backend.parallel import agree, from_main_rank, initialize, main_rank_first
from relax.backend.weights.export import check_output
from relax.cli.objective_flags import build_objective, loss_flag
from relax.cli.places import step_paths
from relax.cli.settings import (
    check_model,
    check_vocabulary,
    data_options,
    optimizer_options,
    packing,
    parallel_config,
    recompute_options,
    router_options,
    total_steps,
)
from relax.data import load_pairs
from relax.data.data_report import OneByOne, counted
from relax.data.held_out import check_held_out
from relax.data.provenance import trained_template
from relax.data.requirements import check_groups
from relax.data.scratch import whole_file
from relax.errors import UserError
from relax.objectives import with_role
from relax.reference.fill import fill_table, open_table
from relax.tracking.tracker import Tracker, WandbOptions
from relax.training.batches import Batches, ReadAhead
from relax.training.profiling import StepProfiler
from relax.training.stopping import StopSignal
from relax.training.weight_source import (
    WeightSource,
    changed_flags,
    check_data,
    check_objective,
    check_reference,
    check_same_run,
    load_weights,
    recorded_date,
    reference_identity,
    resume,
)


class RunSetup:
    """One `python -m relax.train`: data, model, optimizer, log, and the step that it stands at."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tracker: Tracker | None = None
        self.ahead: ReadAhead[tuple[np.ndarray, Batch]] | None = None
        self.objective = build_objective(args)
        self.metric_names = [metric.name for metric in self.objective.metrics]
        self.device = select_device(args.device)
        self.hf_config = read_hf_config(args.hf_checkpoint)
        check_model(args, self.hf_config)
        if args.save_hf:
            for output in step_paths(args.save_hf):
                check_output(output, source=args.hf_checkpoint)
        parallel = parallel_config(args)
        initialize(
            parallel,
            device=self.device,
            seed=args.seed,
            virtual_stages=parallel.virtual_stages(self.hf_config.num_hidden_layers),
            timeout_minutes=args.distributed_timeout_minutes,
        )
        self.store = CheckpointStore(args.save, keep=args.keep_checkpoints) if args.save and not args.skip_train else None
        if self.store:
            self.store.claim()  # before looking into it, and before the data and the reference pass take their time
        self.resumed = find_checkpoint(args.load, step=args.ckpt_step, flag="--load") if args.load else None
        self.start_step = self.resumed.step if self.resumed and not args.finetune else 0
        self.source = WeightSource(args.ref_load, args.ref_ckpt_step)
        if self.resumed:
            check_objective(self.resumed, loss_type=args.loss_type, head=self.objective.head)
            if not args.finetune and not args.skip_train:
                check_same_run(self.resumed, self.flags(), needs_reference=self.objective.needs_reference)
        if self.objective.needs_reference or not self.resumed:
            self.source.check()
        self.engine = Engine(
            self.hf_config,
            objective=self.objective,
            device=self.device,
            dtype=torch.bfloat16 if args.bf16 else torch.float32,
            parallel=parallel,
            attention=args.attention_backend,
            **recompute_options(args),
            **router_options(args),
        )
        self.date = from_main_rank(self._template_date)
        self.packing = packing(args, dp_size=self.engine.dp_size, hidden_size=self.hf_config.hidden_size)
        self.train_set = self._read(args.prompt_data, title="train") if args.prompt_data else None
        self.chat_template = None
        if args.prompt_data:
            options = data_options(args, objective=self.objective)
            self.chat_template = trained_template(args.prompt_data, tokenizer_dir=args.hf_checkpoint, options=options)
        self.eval_sets = {
            name: self._read([path], title=f"eval {name}".rstrip()) for name, path in args.eval_prompt_data.items()
        }
        self.sets = {"train": self.train_set} if self.train_set else {}
        self.sets |= {f"eval {name}".rstrip(): batches for name, batches in self.eval_sets.items()}
        self.total_steps = total_steps(args, self.train_set)
        self.trains = self.start_step < self.total_steps
        self.evaluates_first = bool(self.eval_sets) and (args.skip_train or self.start_step == 0)
        self.stop_signal = StopSignal()
        self._prepare_weights()
        self.shape = model_shape(self.hf_config, head=self.objective.head)
        self.peak_tflops = args.peak_tflops or peak_tflops(self.device, self.engine.dtype)
        agree(self._open_log if is_main_rank() else None)
        self.profiler = None
        if args.profile:
            trace = args.log_dir / args.exp_name / f"trace-rank{dist.get_rank()}.json"
            self.profiler = StepProfiler(trace, first=args.profile_step_start, last=args.profile_step_end)
        if self.trains:
            self.ahead = ReadAhead(self._read_step, steps=range(self.start_step + 1, self.total_steps + 1))

    def _read_step(self, step: int) -> tuple[np.ndarray, Batch]:
        """The pairs of a step, packed and laid out, and their indices."""
        assert self.train_set is not None
        _, indices = self.train_set.indices(step)
        batch = self.train_set.batch(indices)
        return indices, replace(batch, layouts=self.engine.lay_out(batch))

    def _read(self, paths: list[str], *, title: str) -> Batches:
        args = self.args
        dataset = main_rank_first(
            lambda first: load_pairs(
                paths,
                tokenizer_dir=args.hf_checkpoint,
                options=data_options(args, objective=self.objective),
                cache_dir=args.data_cache_dir,
                num_workers=args.num_workers,
                title=title,
                indexed=indexed,
                verify=first,
                today=self.date,
            )
        )
        check_vocabulary(dataset, args, self.hf_config)
        check_groups(dataset, self.objective, flag=loss_flag(self.objective), indexed=indexed)
        if title != "train" and self.train_set:
            check_held_out(dataset, self.train_set.dataset, strict=args.strict_data)
        self.say(dataset.report.table())
        return Batches(
            dataset=dataset,
            packing=self.packing,
            batch_size=args.global_batch_size,
            seed=args.seed,
            shuffle=args.shuffle and title == "train",
        )

    def _template_date(self) -> date:
        """The day that templates read from the clock: the first run's, through all that continue it."""
        saved = recorded_date(self.resumed) if self.resumed and not self.args.finetune else None
        return saved or date.today()

    def _open_log(self) -> None:
        try:
            self._write_data_report()
        except OSError as error:
            raise UserError(f"--log-dir {self.args.log_dir}: data_report.json cannot be written: {error.strerror}") from None
        self.tracker = self._open_tracker()

    def _write_data_report(self) -> None:
        report = {title: batches.dataset.report.to_json(rows=OneByOne) for title, batches in self.sets.items()}
        with whole_file(self.args.log_dir / self.args.exp_name / "data_report.json") as stream:
            json.dump(report, stream, indent=1, ensure_ascii=False)
            stream.write("\n")

    def _prepare_weights(self) -> None:
        """The reference's numbers first, while the model alone is in memory; then the policy's weights, then the optimizer."""
        args, engine, info = self.args, self.engine, self.resumed
        if info and self.train_set and not args.finetune:
            check_data(info, fingerprint=self.train_set.dataset.fingerprint)
        self.reference: dict[str, Any] | None = None
        if self.objective.needs_reference or not info:
            self.source.load(engine, seed=args.seed)
            if self.objective.needs_reference:
                self.reference = reference_identity(engine, self.source)
                if info and not args.finetune:
                    check_reference(self.reference, info)
                self._fill_tables(self.reference["sha256"])
        continues = info is not None and self.trains and not args.finetune
        if info and not continues:
            load_weights(engine, info, seed=args.seed)
        if self.trains:
            engine.prepare_training(optimizer_options(args, self.total_steps))
        if info and continues:
            for change in changed_flags(info, self.flags(), loss_type=args.loss_type):
                self.say(f"not as in the checkpoint: {change}")
            resume(engine, info, optimizer=args.load_optim, rng=args.load_rng, say=self.say)
        self.say(f"{args.loss_type}: {engine.num_parameters / 1e6:.1f} M parameters on {self.device}, step {self.start_step}")
        for work, choice in engine.ops.choices.items():
            self.say(f"{work}: {choice.name} ({choice.why})")

    def _fill_tables(self, sha256: str) -> None:
        for title, batches in self.sets.items():
            if title == "train" and not self.trains:
                continue
            used = range(self.start_step + 1, self.total_steps + 1) if title == "train" else batches.all_steps
            start = time.perf_counter()
            open_table(self.engine, batches, reference_sha256=sha256, directory=self.args.data_cache_dir)
            if batches.table and (damaged := batches.table.damaged):
                self.say(f"reference, {title}: {counted(damaged, 'stored row')} damaged or half written: not used")
            scored = fill_table(self.engine, batches, steps=used, after_each=self._heed_signals)
            seconds = time.perf_counter() - start
            self.say(f"reference, {title}: {scored} pairs scored in {seconds:.1f} s, the rest known")

    def _heed_signals(self) -> None:
        """Before training there is nothing to save but the reference table, which is written as it grows."""
        if stopped := self.stop_signal.on_any_rank(self.device):
            self.say(f"stopped by signal {stopped} before the first step")
            sys.exit(128 + stopped)

    def _open_tracker(self) -> Tracker:
        args = self.args
        wandb = None
        if args.use_wandb:
            wandb = WandbOptions(project=args.wandb_project, name=args.wandb_name, mode=args.wandb_mode)
        shown = [metric for role in ("loss", "accuracy", "margin") for metric in with_role(self.objective.metrics, role)]
        return Tracker(
            log_dir=args.log_dir,
            exp_name=args.exp_name,
            total_steps=self.total_steps,
            start_step=0 if args.skip_train else self.start_step,
            log_interval=args.log_interval,
            headline={f"train/{args.loss_type}/{metric.name}": metric for metric in shown},
            wandb=wandb,
            tensorboard_dir=args.tensorboard_dir,
            config=self.flags(),
            bar=None,
        )

    def flags(self) -> dict[str, Any]:
        """The parsed flags as plain values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self.args).items()}

    def say(self, text: str) -> None:
        """Tell the user, once for all ranks."""
        if is_main_rank():
            self.tracker.print(text) if self.tracker else print(text, flush=True)
