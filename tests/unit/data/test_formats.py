"""Each row format becomes the same pair; what does not fit its file's format is refused with a stable code."""

from typing import Any

import pytest

from relax.data.columns import resolve_columns
from relax.data.detection import choose_format
from relax.data.formats import read_group
from relax.data.options import DataOptions
from relax.data.rows import REASONS, Group, PlainText, RowRejected
from relax.errors import UserError
from tests.unit.data.samples import assistant, chat_row, user

HISTORY = [user("What is it?")]
SYSTEM = {"role": "system", "content": "Be brief"}
DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: What is it?\n\nAssistant:"


def read(row: Any, *, first: dict[str, Any] | None = None, **options: Any) -> tuple[str, Group]:
    """(format, pair) of a row in a file whose first row is `first`."""
    first = first or row
    settings = DataOptions(**options)
    columns = resolve_columns(set(first), options=settings, path="data.jsonl")
    name = choose_format([first], columns=columns, path="data.jsonl", allowed=DataOptions(**options).row_formats)
    return name, read_group(row, name=name, columns=columns, options=settings)


@pytest.mark.parametrize(
    ("row", "options", "name", "history"),
    [
        (chat_row("What is it?", "A", "B"), {}, "implicit_prompt", HISTORY),
        ({"prompt": "What is it?", "chosen": "A", "rejected": "B"}, {}, "explicit_prompt", HISTORY),
        ({"prompt": HISTORY, "chosen": assistant("A"), "rejected": [assistant("B")]}, {}, "explicit_prompt", HISTORY),
        # UltraFeedback as published: a prompt string beside two whole conversations.
        ({"prompt": "What is it?", **chat_row("What is it?", "A", "B")}, {}, "implicit_prompt", HISTORY),
        # orca_dpo_pairs as published.
        (
            {"system": "Be brief", "question": "What is it?", "chosen": "A", "rejected": "B"},
            {},
            "alpaca",
            [SYSTEM, *HISTORY],
        ),
        (
            {"sys": "Be brief", "q": "What is it?", "good": "A", "bad": "B"},
            {"conversation_key_map": {"sys": "system", "q": "prompt", "good": "chosen", "bad": "rejected"}},
            "alpaca",
            [SYSTEM, *HISTORY],
        ),
        (
            {"instruction": "What", "input": "is it?", "history": [["Hi", "Hello"]], "chosen": "A", "rejected": "B"},
            {},
            "alpaca",
            [user("Hi"), assistant("Hello"), user("What\nis it?")],
        ),
        (
            {
                "conversations": [{"from": "human", "value": "What is it?"}],
                "chosen": {"from": "gpt", "value": "A"},
                "rejected": {"from": "gpt", "value": "B"},
            },
            {},
            "sharegpt",
            HISTORY,
        ),
        (
            {
                "talk": [{"who": "person", "says": "What is it?"}],
                "chosen": {"who": "bot", "says": "A"},
                "rejected": {"who": "bot", "says": "B"},
            },
            {
                "conversation_key_map": {
                    "talk": "conversations",
                    "who": "role",
                    "says": "content",
                    "person": "user",
                    "bot": "assistant",
                }
            },
            "sharegpt",
            HISTORY,
        ),
        (
            {"chosen": DIALOGUE + " A", "rejected": DIALOGUE + " B"},
            {},
            "dialogue",
            [user("Hi"), assistant("Hello"), *HISTORY],
        ),
        (
            {"prompt": DIALOGUE, "chosen": " A", "rejected": " B"},
            {},
            "dialogue",
            [user("Hi"), assistant("Hello"), *HISTORY],
        ),
        (
            {"ask": "What is it?", "win": "A", "lose": "B"},
            {"prompt_key": "ask", "chosen_key": "win", "rejected_key": "lose"},
            "explicit_prompt",
            HISTORY,
        ),
    ],
)
def test_every_format_gives_the_same_pair(row: Any, options: Any, name: str, history: Any):
    found, pair = read(row, **options)
    assert found == name
    assert list(pair.history) == history
    assert pair.completions == (assistant("A"), assistant("B"))


def test_plain_text_formats_carry_their_text():
    _, pair = read({"prompt": "Sum (", "chosen": "46", "rejected": "$46"})
    assert pair.text == PlainText("Sum (", ("46", "$46"))
    _, pair = read({"chosen": DIALOGUE + " A", "rejected": DIALOGUE + " B"})
    assert pair.text == PlainText(DIALOGUE, (" A", " B"))
    _, pair = read({"chosen": [*HISTORY, assistant("A")], "rejected": [*HISTORY, assistant("B")]})
    assert pair.text is None


def test_optional_columns_are_read():
    row = chat_row("Q", "A", "B", tools='[{"name": "f"}]', margin="0.5", chat_template_kwargs={"enable_thinking": False}, uid=7)
    _, pair = read(row, pair_id_key="uid")
    assert pair.tools == [{"name": "f"}]
    assert pair.columns == {"margin": 0.5}
    assert pair.template_kwargs == {"enable_thinking": False}
    assert pair.pair_id == "7"
    _, pair = read(chat_row("Q", "A", "B", functions=[{"name": "g"}]), tool_key="functions")
    assert pair.tools == [{"name": "g"}]


def test_system_prompt_goes_only_where_the_row_has_none():
    _, pair = read(chat_row("Q", "A", "B"), system_prompt="Be brief")
    assert list(pair.history) == [SYSTEM, user("Q")]
    own = {"role": "system", "content": "Own"}
    row = {"chosen": [own, user("Q"), assistant("A")], "rejected": [own, user("Q"), assistant("B")]}
    _, pair = read(row, system_prompt="Be brief")
    assert list(pair.history) == [own, user("Q")]


def test_messages_keep_their_other_fields_and_join_text_parts():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]}
    _, pair = read({"chosen": [parts, call], "rejected": [parts, assistant("B")]})
    assert list(pair.history) == HISTORY
    assert pair.completions[0] == {**call, "content": ""}


GOOD = chat_row("Q", "A", "B")
FULL = {**GOOD, "margin": 1.0, "tools": []}
EXPLICIT = {"prompt": "Q", "chosen": "A", "rejected": "B"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Q"}], "chosen": "A", "rejected": "B"}
TALK = {"chosen": DIALOGUE + " A", "rejected": DIALOGUE + " B"}


@pytest.mark.parametrize(
    ("first", "row", "code", "detail"),
    [
        (GOOD, ["not", "an", "object"], "schema", "the row is a list of 3"),
        (GOOD, None, "schema", "the row is null, not an object"),
        (GOOD, True, "schema", "the row is a boolean, not an object"),
        (GOOD, {"chosen": GOOD["chosen"]}, "schema", "rejected is missing"),
        (GOOD, {**GOOD, "chosen": [assistant("x"), user("Q")]}, "schema", "chosen ends with role 'user'"),
        (GOOD, {**GOOD, "chosen": [assistant("A")]}, "schema", "nothing that it answers"),
        (GOOD, {**GOOD, "chosen": "text"}, "schema", "chosen is a string, not a list of messages"),
        (GOOD, {**GOOD, "chosen": [{"content": "Q"}, assistant("A")]}, "schema", "a message of chosen has no role"),
        (GOOD, {**GOOD, "chosen": ["Q", "A"]}, "schema", "chosen holds a string where a message should be"),
        (GOOD, {**GOOD, "chosen": [{"role": "user", "content": 3}, assistant("A")]}, "schema", "not text (a number)"),
        (FULL, {**GOOD, "margin": float("inf")}, "schema", "margin is inf"),
        (FULL, {**GOOD, "margin": 10**400}, "schema", "margin is 1000000000"),
        (FULL, {**GOOD, "margin": "high"}, "schema", "margin is 'high', not a number"),
        (FULL, {**GOOD, "margin": 1e300}, "schema", "not a finite number"),
        (FULL, {**GOOD, "tools": "{"}, "schema", "tools is not valid JSON"),
        (FULL, {**GOOD, "tools": {"name": "f"}}, "schema", "tools is an object, not list"),
        (GOOD, chat_row("Q", "A", "A"), "identical", "equal"),
        (GOOD, chat_row("Q", "A", " \n"), "empty_completion", "rejected is empty"),
        (EXPLICIT, {**EXPLICIT, "prompt": ""}, "schema", "prompt is missing"),
        (EXPLICIT, {**EXPLICIT, "chosen": user("A")}, "schema", "chosen has role 'user'"),
        (EXPLICIT, {**EXPLICIT, "chosen": [assistant("A"), assistant("B")]}, "schema", "2 messages beside a prompt"),
        (EXPLICIT, {**EXPLICIT, "chosen": 46}, "schema", "chosen holds a number where a message should be"),
        ({**EXPLICIT, "system": "S"}, {**EXPLICIT, "history": ["x"]}, None, ""),
        ({**EXPLICIT, "history": [["a", "b"]]}, {**EXPLICIT, "history": ["x"]}, "schema", "history is not a list of"),
        ({**EXPLICIT, "system": "S"}, {"chosen": "A", "rejected": "B"}, "schema", "prompt is missing"),
        ({**EXPLICIT, "system": "S"}, {**EXPLICIT, "system": 5}, "schema", "system is a number, not a string"),
        (SHAREGPT, {**SHAREGPT, "conversations": []}, "schema", "conversations is empty"),
        (SHAREGPT, {**SHAREGPT, "conversations": [assistant("A")]}, "schema", "the prompt ends with the assistant's own words"),
        (
            {**SHAREGPT, "system": "S"},
            {**SHAREGPT, "system": "S", "conversations": [SYSTEM, user("Q")]},
            "schema",
            "a system column and another system message",
        ),
        (TALK, {**TALK, "chosen": "no turns"}, "schema", "not a dialogue of Human: and Assistant: turns"),
        (TALK, {**TALK, "chosen": [user("Q")]}, "schema", "the row is implicit_prompt, and most rows of its file are dialogue"),
        (TALK, {**TALK, "chosen": "\n\nHuman: Other\n\nAssistant: A"}, "prompt_mismatch", "before their last answer"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(first: Any, row: Any, code: str | None, detail: str):
    if code is None:  # history is no column of the file, so nothing reads it
        read(row, first=first)
        return
    with pytest.raises(RowRejected) as refused:
        read(row, first=first)
    assert refused.value.code == code
    assert code in REASONS
    assert detail in refused.value.detail


def test_messages_that_follow_a_prompt_are_no_whole_conversation():
    turns = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "3"}, assistant("A")]
    row = {"prompt": [user("Q")], "chosen": turns, "rejected": [*turns[:2], assistant("B")]}
    with pytest.raises(RowRejected, match="chosen holds 3 messages beside a prompt"):
        read(row)


def test_a_missing_pair_id_is_refused():
    with pytest.raises(RowRejected, match="uid .--pair-id-key. is missing"):
        read({**GOOD, "uid": None}, first={**GOOD, "uid": 1}, pair_id_key="uid")


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RowRejected, match="half of a surrogate pair"):
        read(chat_row("Q", "A\ud800", "B"))


def test_a_file_without_pairs_names_its_columns():
    with pytest.raises(UserError, match="data.jsonl: no row holds a preference pair. Columns found: good, text"):
        read({"text": "x", "good": "y"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_key": "ask"}, r"no column 'ask' \(--prompt-key\). The file has: chosen, rejected"),
        ({"tool_key": "functions"}, r"no column 'functions' \(--tool-key\)"),
        ({"pair_id_key": "uid"}, r"no column 'uid' \(--pair-id-key\)"),
        ({"conversation_key_map": {"prompt": "question"}}, "maps 'prompt' to 'question' .* to one of: prompt, query"),
    ],
)
def test_a_wrong_column_name_is_an_error(options: Any, message: str):
    with pytest.raises(UserError, match=message):
        read(GOOD, **options)
