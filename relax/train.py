"""`python -m relax.train`: train a DPO policy or a reward model on preference pairs. Under torchrun it is the same command."""

from relax.cli.arguments import parse_args
from relax.cli.command import run_command


def main() -> None:
    """Parse, set up, loop."""
    args = parse_args()
    if args.dry_run:
        from relax.commands.dry_run import describe  # torch and megatron-core load only once the flags are right

        return describe(args)
    from relax.training.run import Run

    with Run(args) as run:
        if run.evaluates_first:
            run.log(run.start_step, run.evaluate())
        for step in range(run.start_step + 1, run.total_steps + 1):
            metrics = run.train_step(step)
            if run.evaluates_after(step):
                metrics |= run.evaluate()
            run.log(step, metrics)
            stopped = run.stop_signal.on_any_rank(run.device)
            if run.saves_after(step) or stopped:
                run.save(step)
            if stopped:
                run.stop(stopped, step)
        run.finish()


if __name__ == "__main__":
    run_command(main)
