"""The name of a cache entry: everything that decides its bytes.

File contents in order, the tokenizer's files, the options, the versions of the libraries that render and encode, and
the version of this pipeline. Paths, times and worker counts stay out, so that moved or touched files are still found.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import transformers

from relax.data.dataset import FORMAT_VERSION
from relax.data.options import DataOptions
from relax.data.prefix import check_digest, read_sidecar
from relax.data.sources import data_files, data_kind
from relax.errors import UserError

# Raise when the same rows give other ids or another report than before.
PIPELINE_VERSION = 5
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    "additional_chat_templates/*", "*.model", "config.json",
    "generation_config.json",
)  # fmt: skip


def cache_key(files: Sequence[Path], *, tokenizer_dir: Path, options: DataOptions) -> str:
    """64 hex digits. Raises `UserError` for a file that cannot be read, or that is not as its sidecar says."""
    digest = hashlib.sha256(repr((FORMAT_VERSION, PIPELINE_VERSION, transformers.__version__, tokenizers.__version__)).encode())
    digest.update(options.identity().encode())
    for path in files:
        sidecar = read_sidecar(path)
        for file in data_files(path):
            sha256 = file_sha256(file)
            if sidecar:
                check_digest(file, prefix=path, sidecar=sidecar, sha256=sha256)
            digest.update(f"data {data_kind(file) or file.suffix} {str(file).removeprefix(str(path))} {sha256}\n".encode())
    named = {path for pattern in TOKENIZER_FILES for path in tokenizer_dir.glob(pattern) if path.is_file()}
    for file in sorted(named):
        digest.update(f"tokenizer {file.relative_to(tokenizer_dir)} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hex digest of a file. Raises `UserError` for one that cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
