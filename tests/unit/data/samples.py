"""Small tokenizers with real merges and chat templates as real models have them, and rows to feed them.

The tokenizers are byte-level BPE, trained here on a few lines, so that no test downloads anything. Their merges include
the ones that cause trouble at a prompt's end: a doubled newline, and a bracket or a dollar sign with what follows it.
"""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from relax.data import DataOptions, GroupDataset, load_pairs

# ChatML as SmolLM2 writes it: a default system message, a newline after every turn.
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's behaviour: history loses its thinking, the last answer always has a <think> block, tools go first,
# enable_thinking=False puts an empty block into the generation prompt.
QWEN3 = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}{%- set reasoning = '' %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# Llama-2 style: BOS in the template, the answer closed by EOS, no newline after it, roles that must alternate.
LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)

# How Qwen splits text before merging. GPT-2's split parts "\n\n" in front of a word, Qwen's does not.
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>")
CORPUS = (
    "system user assistant\n\n",
    "What is the answer to the question? The answer is (46) or ($46), the total (in dollars) is $46.",
    "\n\nHuman: Hello there\n\nAssistant: Hello to you too\n\n",
    "one two three four five six seven eight nine ten\n\n",
    "Be helpful. Think first, then answer the question.",
)


def build_tokenizer(
    directory: Path,
    *,
    template: str | None = CHATML,
    bos: str | None = None,
    eos: str | None = "<|im_end|>",
    adds_bos: bool = False,
) -> Path:
    """Save a tokenizer into `directory`; `adds_bos` puts BOS into the post-processor, as Llama 3 does."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        if template == QWEN3
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(alphabet), special_tokens=list(SPECIAL))
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("<think>", "</think>")])
    if adds_bos and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    names = {"bos_token": bos, "eos_token": eos, "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: token for name, token in names.items() if token is not None}
    )
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


def write_kind(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a file of the path's kind, as usual writers make one."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return path
    if path.suffix == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()} for row in rows)
        return path
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    # NaN stays NaN in a column of numbers, and is null in one of text.
    arrays = {
        name: pa.array(cells, from_pandas=any(isinstance(cell, str) for cell in cells)) for name, cells in columns.items()
    }
    table = pa.table(arrays)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat_row(question: str, chosen: str, rejected: str, **columns: Any) -> dict[str, Any]:
    """A row of the primary format: two conversations with the same question."""
    return {
        "chosen": [user(question), assistant(chosen)],
        "rejected": [user(question), assistant(rejected)],
        **columns,
    }


def load(
    data: Path | list[Path], tokenizer_dir: Path, *, cache: Path | None = None, workers: int = 1, **options: Any
) -> GroupDataset:
    """`load_pairs` with a cache beside the data."""
    files = data if isinstance(data, list) else [data]
    return load_pairs(
        [str(file) for file in files],
        tokenizer_dir=tokenizer_dir,
        options=DataOptions(**options),
        cache_dir=cache or files[0].parent / "cache",
        num_workers=workers,
        title="train",
    )
