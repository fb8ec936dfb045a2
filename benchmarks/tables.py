"""What vs_trl.py prints: the machine, one table per comparison, and what a reader must know to read them right."""

from typing import Any

BUSY = 0.7  # load average from which the machine counts as busy
COLUMNS = (
    "side",
    "wall s",
    "CPU s",
    "pairs/s",
    "tokens/s",
    "tokens/CPU s",
    "peak GiB (of TRL's)",
    "speed, wall",
    "speed, CPU",
    "of fp32 / bf16 GEMM",
)


def heading(report: dict[str, Any]) -> str:
    machine = report["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    environment = " ".join(f"{name}={value}" for name, value in machine["environment"].items())
    rates = ", ".join(f"{dtype} {1000 * rate:,.0f} GFLOP/s" for dtype, rate in report["gemm_tflops"].items())
    return (
        f"{report['date']}: {machine['processor']}, {machine['cores']} cores ({' '.join(machine['instruction_sets'])}), "
        f"{machine['memory_gib']} GiB, load {machine['load_average']:.1f}; {report['threads']} threads a side\n"
        f"{packages}\nmatrix product at 2,048 squared: {rates}\nenvironment: {environment}"
    )


def table(result: dict[str, Any]) -> str:
    """Markdown: one line per side, then the losses."""
    lines = [
        f"\n**{result['objective'].upper()}, {result['model']} ({result['parameters'] / 1e6:.1f} M), {result['dtype']}, "
        f"{result['pairs_per_step']} pairs, max length {result['max_length']}, "
        f"{result['tokens_per_step']:,.0f} tokens a step**\n",
        "| " + " | ".join(COLUMNS) + " |",
        "| --- |" + " ---: |" * (len(COLUMNS) - 1),
    ]
    for row in result["summary"]:
        share = row["share_of_gemm"]
        cells = [
            row["side"],
            *(f"{row[key]:.2f}" for key in ("wall_s", "cpu_s", "pairs_per_s")),
            *(f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_cpu_s")),
            f"{row['peak_rss_gib']:.2f} ({row['peak_rss_of_trl']:.2f}x)",
            *("{:.2f}x ({:.2f} to {:.2f})".format(row[key], *row[key + "_range"]) for key in ("speedup_wall", "speedup_cpu")),
            f"{share['fp32']:.0%} / {share['bf16']:.0%}" if share else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("\n| loss at step | relax | TRL | difference |\n| ---: | ---: | ---: | ---: |")
    for step, turn in enumerate(result["steps"], 1):
        ours, theirs = turn["relax"]["loss"], turn["trl"]["loss"]
        lines.append(f"| {step} | {ours:.6f} | {theirs:.6f} | {ours - theirs:+.1e} |")
    return "\n".join(lines)


def notes(report: dict[str, Any]) -> list[str]:
    """What a reader must know to read the tables right."""
    fp32, bf16 = report["gemm_tflops"]["fp32"], report["gemm_tflops"]["bf16"]
    dtypes = {result["dtype"] for result in report["results"]}
    objectives = {result["objective"] for result in report["results"]}
    lines = [
        "Tokens are real ones, both sequences of each pair, prompts counted twice; padding never. Speed is TRL's seconds over "
        "relax's, step by step: the median and the range. Peak memory is the process's own, start-up and tokenizing included.",
        "FLOPs are those the objective needs as relax lays pairs out: 6 per parameter and token, the vocabulary only at answer "
        "tokens; a reference pass counts a third of a step.",
    ]
    if "dpo" in objectives:
        lines.append(
            "TRL computes its reference at every step (its default); relax once per pair and run, so that runs of several "
            "epochs lie between its two lines."
        )
    if "bf16" in dtypes:
        lines.append("In bf16 relax keeps fp32 master weights and gradients; TRL's weights, gradients and moments are bf16.")
    if "bf16" in dtypes and bf16 < fp32:
        lines.append(
            f"This CPU has no fast bf16 product: torch's own is {fp32 / bf16:.1f} times slower than fp32 here. relax widens "
            "bf16 operands to fp32 for matrix products on such CPUs, TRL does not, and most of the bf16 ratio may come from "
            "that: the fp32 table compares the rest."
        )
    if report["machine"]["load_average"] > BUSY:
        lines.append(
            f"The load average was {report['machine']['load_average']:.1f} at the start: other work ran, and wall times are "
            "worth little."
        )
    return lines
