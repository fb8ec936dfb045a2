"""Faults that users of other trainers reported, on small inputs, and the right behaviour for each.

One test per fault of the data path; the others of the list (reference rows, packed means, small evaluation sets, resume)
rest on what is shown here: stable hashes and fingerprints, whole lengths, and an order that step and seed decide.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from relax.data import DataOptions, PairOrder
from relax.data.render import GroupEncoder
from relax.data.tokenizer import load_tokenizer
from relax.errors import UserError
from tests.unit.data.samples import CHATML, QWEN3, assistant, build_tokenizer, chat_row, load, user, write_jsonl


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("chatml"), template=CHATML)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("qwen3"), template=QWEN3)


@pytest.mark.parametrize("prompt", ["The answer is (", "The answer is "])
def test_byte_pair_merges_across_the_boundary(tmp_path: Path, chatml: Path, prompt: str):
    rows = [{"prompt": prompt, "chosen": "46", "rejected": "$46"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for directory in (chatml, build_tokenizer(tmp_path / "plain", template=None)):
        tokenizer = load_tokenizer(directory)
        merged = tokenizer.encode(prompt + "$46")[: len(tokenizer.encode(prompt))]
        assert merged != tokenizer.encode(prompt)  # the trap is real: the prompt's last token changes with the answer
        pair = load(path, directory)[0]
        assert prompt in tokenizer.decode(pair.prompt)
        assert tokenizer.decode(pair.completions[0]) == "46<|im_end|>"
        assert tokenizer.decode(pair.completions[1]) == "$46<|im_end|>"


def test_a_template_call_that_returns_a_dict(qwen3: Path):
    tokenizer = load_tokenizer(qwen3)
    messages = [user("Q"), assistant("A")]
    assert not isinstance(tokenizer.apply_chat_template(messages), list)  # the default of transformers 5
    inner = tokenizer.apply_chat_template

    def always_dict(conversation: object, **kwargs: object) -> object:
        return inner(conversation, **{**kwargs, "return_dict": True})

    tokenizer.apply_chat_template = always_dict
    with pytest.raises(UserError, match="Self-check failed: apply_chat_template gave BatchEncoding"):
        GroupEncoder(tokenizer, options=DataOptions())


def test_think_in_one_answer_keeps_its_first_tag(tmp_path: Path, qwen3: Path):
    row = chat_row("Q", "<think>\nwhy\n</think>\n\nYes", "No")
    pair = load(write_jsonl(tmp_path / "a.jsonl", [row]), qwen3)[0]
    tokenizer = load_tokenizer(qwen3)
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert pair.completions[0][0] == pair.completions[1][0] == think
    assert think not in pair.prompt


def test_history_thinking_is_rendered_as_at_inference(tmp_path: Path, qwen3: Path):
    history = [user("Q"), assistant("<think>\nfirst\n</think>\n\nA"), user("R")]
    row = {"chosen": [*history, assistant("Yes")], "rejected": [*history, assistant("No")]}
    pair = load(write_jsonl(tmp_path / "a.jsonl", [row]), qwen3)[0]
    tokenizer = load_tokenizer(qwen3)
    inference = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
    assert pair.prompt.tolist() == inference
    assert "first" not in tokenizer.decode(pair.prompt)


def test_the_end_token_comes_once_and_is_trained(tmp_path: Path, chatml: Path, qwen3: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "Yes", "No")])
    for directory in (chatml, qwen3):
        end = load_tokenizer(directory).convert_tokens_to_ids("<|im_end|>")
        pair = load(path, directory)[0]
        for ids in pair.completions:
            assert ids[-1] == end and np.count_nonzero(ids == end) == 1


def test_a_prompt_as_long_as_the_limit_leaves_whole_answers(tmp_path: Path, chatml: Path):
    row = chat_row("one two three " * 50, "Yes", "No")
    pair = load(write_jsonl(tmp_path / "a.jsonl", [row]), chatml, max_length=32, max_completion_length=16)[0]
    tokenizer = load_tokenizer(chatml)
    assert (tokenizer.decode(pair.completions[0]), tokenizer.decode(pair.completions[1])) == ("Yes<|im_end|>", "No<|im_end|>")
    assert len(pair.prompt) + max(map(len, pair.completions)) == 32
    assert tokenizer.decode(pair.prompt).endswith("<|im_start|>assistant\n")


def test_a_long_answer_beside_a_short_one_is_cut_and_counted(tmp_path: Path, chatml: Path):
    row = chat_row("Q", "one " * 20, "No.")
    data = load(write_jsonl(tmp_path / "a.jsonl", [row]), chatml, max_length=17, max_completion_length=16)
    assert data.lengths[0, 1] == 16 and data.lengths[0].min() >= 1
    assert data.report.marks["truncated"] == 1
    assert all(math.isfinite(value) for part in data.report.tokens.values() for value in part.values())


def test_answers_identical_after_truncation_are_dropped(tmp_path: Path, chatml: Path):
    shared = "one two three " * 200
    rows = [chat_row("Q", shared + "Yes", shared + "No"), chat_row("Q", "Yes", "No")]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), chatml, max_length=1024, max_completion_length=512)
    assert len(data) == 1
    assert data.report.to_json()["rejected"]["post_truncation_identical"]["count"] == 1


def test_rows_are_known_by_their_content(tmp_path: Path, chatml: Path):
    rows = [chat_row(f"Q{i}", "Yes", "No") for i in range(7)]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), chatml)
    turned = load(write_jsonl(tmp_path / "b.jsonl", rows[::-1]), chatml)
    assert np.array_equal(data.hashes, turned.hashes[::-1])
    assert len({row.tobytes() for row in data.hashes}) == 7


def test_pairs_keep_their_own_lengths_whatever_their_neighbours(tmp_path: Path, chatml: Path):
    rows = [chat_row("Q", "one " * (i + 1), "No") for i in range(10)]
    together = load(write_jsonl(tmp_path / "a.jsonl", rows), chatml)
    for i in (0, 9):
        alone = load(write_jsonl(tmp_path / f"{i}.jsonl", [rows[i]]), chatml)
        assert np.array_equal(alone.lengths[0], together.lengths[i])
        assert np.array_equal(alone.hashes[0], together.hashes[i])


def test_a_set_smaller_than_the_batch_is_one_whole_batch():
    epoch, indices = PairOrder(3, batch_size=8, seed=0, shuffle=False).at_step(1)
    assert (epoch, indices.tolist()) == (0, [0, 1, 2])


def test_other_data_has_another_fingerprint_and_the_order_needs_only_the_step(tmp_path: Path, chatml: Path):
    rows = [chat_row(f"Q{i}", "Yes", "No") for i in range(7)]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), chatml)
    swapped = load(write_jsonl(tmp_path / "b.jsonl", [rows[1], rows[0], *rows[2:]]), chatml)
    again = load(write_jsonl(tmp_path / "c.jsonl", rows), chatml)
    assert data.fingerprint == again.fingerprint != swapped.fingerprint
    first, second = (PairOrder(7, batch_size=2, seed=5, shuffle=True) for _ in range(2))
    straight = [first.at_step(step)[1].tolist() for step in range(1, 9)]
    resumed = [second.at_step(step)[1].tolist() for step in range(4, 9)]
    assert resumed == straight[3:]
    assert sorted(sum(straight[:4], [])) == list(range(7))


def test_a_model_directory_without_a_tokenizer_says_so(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: no tokenizer there (none of tokenizer.json, tokenizer.model, vocab.json, vocab.txt); copy its files "
        "beside the model."
    )
