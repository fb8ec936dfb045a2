"""Data files -> `GroupDataset`: from the cache where these very pairs were tokenized before, else through the pipeline.

Invariants: the result depends on file contents, tokenizer and options alone, whatever became of the cache, and on the day
where a chat template reads the clock and the options name no day; a tokenized prefix gives the pairs, and so the
fingerprint, of the rows that it was made from.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from tqdm import tqdm

from relax.data.dataset import EntryWriter, GroupDataset, cache_failure, entry_problem
from relax.data.directories import expand_paths, left_out
from relax.data.fingerprint import cache_key
from relax.data.options import DataOptions
from relax.data.pipeline import scan_files, tokenize_files
from relax.data.prefix import is_prefix
from relax.data.template_guard import clock_note, settle_date
from relax.data.tokenized import IndexedFormat
from relax.data.tokenizer import load_tokenizer


def load_pairs(
    paths: Sequence[str],
    *,
    tokenizer_dir: Path | str,
    options: DataOptions,
    cache_dir: Path | str,
    num_workers: int,
    title: str,
    indexed: IndexedFormat | None = None,
    verify: bool = True,
    today: date | None = None,
) -> GroupDataset:
    """Read, tokenize and cache the pairs of `paths`, in order; `title` names the set in the report.

    `indexed` reads tokenized prefixes; `today` is for templates that read the clock. Without `verify`, an entry that is
    there is not read for damage: another process did. Raises `UserError` for files or tokenizers that cannot be used, for
    the first bad row under `options.strict`, and with the whole report when no row is left or more than half are bad,
    those dropped as asked not counted. Several processes may call it at once.
    """
    tokenizer_dir = Path(tokenizer_dir)
    files = expand_paths(paths)
    if not tokenizer_dir.is_dir():
        load_tokenizer(tokenizer_dir)  # says what is missing
    notes = left_out(paths)
    if options.chat_template and not all(map(is_prefix, files)):
        options = replace(
            options, chat_template_kwargs=settle_date(options.template_kwargs, directory=tokenizer_dir, today=today)
        )
        notes += clock_note(options.template_kwargs)
    entry = Path(cache_dir) / cache_key(files, tokenizer_dir=tokenizer_dir, options=options)
    problem = entry_problem(entry) if verify or not entry.is_dir() else None
    if problem is not None:
        scans = scan_files(files, options=options, indexed=indexed)
        tokenizer = load_tokenizer(tokenizer_dir)
        try:
            with EntryWriter(entry) as writer, tqdm(desc=f"tokenize {title}", unit="row", disable=None) as bar:

                def show(done: int, total: int) -> None:
                    bar.total = total
                    bar.update(done - bar.n)

                report = tokenize_files(
                    files,
                    scans,
                    writer,
                    tokenizer=tokenizer,
                    tokenizer_dir=tokenizer_dir,
                    options=options,
                    num_workers=num_workers,
                    title=title,
                    indexed=indexed,
                    progress=show,
                )
                writer.publish(report)
        except OSError as error:
            raise cache_failure(entry.parent, error) from error
    dataset = GroupDataset.open(entry, paths=[str(file) for file in files], title=title)
    rebuilt = [f"{entry}: {problem}; the rows were tokenized again"] if problem else []
    dataset.report = dataset.report.with_notes(*rebuilt, *notes)
    return dataset
