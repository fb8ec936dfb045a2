"""The verbs of a training run, over what `RunSetup` put together: step, evaluate, log, save, stop, finish.

A run is a context: at its end, in order or by an error, it closes what it opened.
"""

import math
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch.distributed as dist

from relax.backend.checkpoint.state import training_state
from relax.backend.device import is_main_rank, peak_memory_gib
from relax.backend.parallel import agree, all_come, shutdown
from relax.backend.weights.export import export_hf
from relax.cli.places import ITERATION
from relax.errors import UserError
from relax.metrics import group_means, throughput
from relax.report import curves, summary
from relax.training.batches import evaluate
from relax.training.run_setup import RunSetup


class Run(RunSetup):
    """One `python -m relax.train`; `train.py` is its story."""

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step; its metrics."""
        assert self.train_set is not None and self.ahead is not None
        if self.store:
            self.store.finish_pending(blocking=False)
        if self.profiler:
            self.profiler.before(step)
        start = time.perf_counter()
        indices, batch = self.ahead.take(step)
        waited = time.perf_counter() - start
        result = self.engine.train_step(batch)
        seconds = time.perf_counter() - start
        if not (math.isfinite(result.grad_norm) and np.isfinite(result.values).all()):
            loss = group_means(result.values, self.metric_names, prefix="")["loss"]
            raise UserError(
                f"step {step}: the loss is {loss:.4g} and the gradient norm {result.grad_norm:.4g}; no checkpoint holds this "
                f"step. Training diverged (--lr {self.args.lr:g}: try a lower one, or --lr-warmup-iters), or the weights or "
                "rows are not what they should be"
            )
        num_pairs = len(self.train_set.dataset)
        consumed = self.train_set.consumed(step)
        return {
            "train/step": step,
            "train/epoch": consumed / num_pairs,
            "train/consumed_pairs": consumed,
            **group_means(result.values, self.metric_names, prefix=f"train/{self.args.loss_type}/"),
            "train/lr": result.lr,
            "train/grad_norm": result.grad_norm,
            **({} if result.moe_aux_loss is None else {"train/moe_aux_loss": result.moe_aux_loss}),
            **throughput(
                self.train_set.work(indices, batch.plan, scores_tokens=self.objective.head == "lm"),
                self.shape,
                seconds=seconds,
                num_pairs=len(indices),
                world_size=dist.get_world_size(),
                peak_tflops=self.peak_tflops,
            ),
            "perf/peak_memory_gib": peak_memory_gib(self.device),
            "perf/data_wait_s": waited,
        }

    def evaluate(self) -> dict[str, float]:
        """Every evaluation set, whole."""
        metrics: dict[str, float] = {}
        for name, batches in self.eval_sets.items():
            metrics |= evaluate(self.engine, batches, prefix="/".join(filter(None, ("eval", name, self.args.loss_type))) + "_")
        return metrics

    def evaluates_after(self, step: int) -> bool:
        return bool(self.eval_sets) and self._due(step, self.args.eval_interval)

    def saves_after(self, step: int) -> bool:
        return self._due(step, self.args.save_interval)

    def _due(self, step: int, interval: int | None) -> bool:
        return step == self.total_steps or (interval is not None and step % interval == 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics; a log that cannot be written ends the run on every rank."""
        tracker = self.tracker
        agree((lambda: tracker.log(step, {"train/step": step, **metrics})) if tracker else None, brief=True)

    def save(self, step: int) -> None:
        """A complete checkpoint of this step, and the Hugging Face export where asked."""
        args = self.args
        if self.store:
            assert self.train_set is not None
            record = {
                "loss_type": args.loss_type,
                "head": self.objective.head,
                "step": step,
                "consumed_pairs": self.train_set.consumed(step),
                "num_pairs": len(self.train_set.dataset),
                "data_fingerprint": self.train_set.dataset.fingerprint,
                "template_date": self.date.isoformat(),
                "chat_template": self.chat_template,
                "arguments": self.flags(),
                "objective_state": dict(self.engine.objective_state),
                "versions": versions(),
            }
            files = {"relax_run.json": record}
            if self.reference:
                files["relax_dpo_reference.json"] = self.reference
            state = training_state(self.engine, step=step, optimizer=args.save_optim, rng=args.save_rng, loading=False)
            self.store.save_checkpoint(step=step, state=state, files=files, async_save=args.async_save)
        self._export(step)

    def _export(self, step: int) -> None:
        args = self.args
        if args.save_hf:
            output = Path(args.save_hf.replace(ITERATION, str(step)))
            export_hf(
                self.engine.chunks,
                self.hf_config,
                source=args.hf_checkpoint,
                output=output,
                chat_template=self.chat_template,
                loss_type=args.loss_type,
                step=step,
            )

    def stop(self, number: int, step: int) -> None:
        """End after a saved step because of a signal."""
        saved = f"saved in {self.args.save}; the same command resumes" if self.args.save else "nothing saved without --save"
        if self.store:
            self.store.finish_pending(blocking=True)
        self.say(f"stopped by signal {number} after step {step}: {saved}")
        sys.exit(128 + number)

    def finish(self) -> None:
        """Show the summary and draw the curves."""
        if not self.trains and not self.args.skip_train:
            self.say(
                f"step {self.start_step} of {self.total_steps} is done: nothing left to train; raise --num-rollout to go on"
            )
        if not self.trains:  # the run before may have ended between its last checkpoint and its export, or while deleting one
            if self.store:
                self.store.tidy()
            self._export(self.start_step)
        speaks = is_main_rank()
        self._close()
        if speaks:
            log = self.args.log_dir / f"{self.args.exp_name}.jsonl"
            curves(log, self.args.log_dir / self.args.exp_name / "curves.png")
            print(summary(log))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Close what is open, whatever ends the run: a checkpoint that is being written becomes whole, or it is said."""
        failed = None if isinstance(error, SystemExit) else error
        try:
            self._close(failed)
        except UserError as another:
            raise (UserError(f"{failed}; and at the end: {another}") if isinstance(failed, UserError) else another) from error

    def _close(self, failed: BaseException | None = None) -> None:
        """All of it, the last opened first, also where closing one raises. Safe to call twice."""
        tracker, self.tracker = self.tracker, None
        with ExitStack() as closing:
            if not failed:
                closing.callback(shutdown)  # a broken group cannot be taken down in order, and the process ends anyway
            if self.store:
                closing.callback(self._finish_save, failed)
            if tracker:
                closing.callback(tracker.close)
            if self.profiler:
                closing.callback(self.profiler.close)
            if self.ahead:
                closing.callback(self.ahead.close)

    def _finish_save(self, failed: BaseException | None) -> None:
        """Finish a background save. An error may be one rank's own, and the others then never come to finish it."""
        assert self.store is not None
        if self.store.pending is None:
            return
        if failed and not all_come(within_seconds=60):
            step = self.store.pending
            print(f"relax: the checkpoint of step {step} is lost: a rank ended while it was being written", file=sys.stderr)
        else:
            self.store.finish_pending(blocking=True)


def versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    return {name: version(name) for name in ("relax", "torch", "megatron-core", "transformers", "numpy")}
