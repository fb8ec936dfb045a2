"""Fetch one archive of a package index with pip, so that the mirrors and proxies set for pip hold here too."""

import hashlib
import subprocess
import sys
from pathlib import Path

from relax.errors import UserError


def fetch(package: str, *, version: str, sha256: str, source: bool, directory: Path) -> Path:
    """Download `package`'s wheel, or its source archive where `source`, into `directory`; the file's path.

    Raises UserError where pip fails or the file is not the one with this SHA-256.
    """
    # `--no-binary PACKAGE`, not `:all:`: its build backend, which pip runs for metadata, may then still be a wheel.
    kind = ["--no-binary", package] if source else ["--only-binary", package]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, "--dest", str(directory)]
    done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"pip could not download {package}=={version}: {reason}; pass a copy with --archive")
    (archive,) = directory.iterdir()
    verify(archive, sha256=sha256)
    return archive


def verify(archive: Path, *, sha256: str) -> None:
    """Raise UserError unless the file exists and has this SHA-256."""
    if not archive.is_file():
        raise UserError(f"{archive}: no such file")
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise UserError(f"{archive} has SHA-256 {found}, expected {sha256}: not the archive that this script reads")
