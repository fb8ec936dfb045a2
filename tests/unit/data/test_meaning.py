"""A row means what it says, however its file writes it: the ids are the right ones, or the row is refused, or it is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from relax.data import DataOptions, GroupDataset
from relax.data.tokenizer import load_tokenizer
from relax.errors import UserError
from tests.unit.data.samples import (
    CHATML,
    KINDS,
    LLAMA,
    QWEN3,
    assistant,
    build_tokenizer,
    chat_row,
    load,
    user,
    write_jsonl,
    write_kind,
)

NAN = float("nan")
# Writes tool calls and tools as JSON, as Qwen's templates do, and reasoning in the last message alone.
TOOLS = (
    "{% for tool in tools or [] %}<|im_start|>system\n{{ tool | tojson }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts arguments together with strings, as DeepSeek's do: an object fails.
TEXT_ARGUMENTS = TOOLS.replace("call.function.arguments | tojson", "'' + call.function.arguments")
# Prints arguments: an object would be written as Python writes it.
PRINTED_ARGUMENTS = TOOLS.replace("call.function.arguments | tojson", "call.function.arguments")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    build_tokenizer(root / "chatml", template=CHATML)
    build_tokenizer(root / "qwen3", template=QWEN3)
    build_tokenizer(root / "tools", template=TOOLS)
    build_tokenizer(root / "llama", template=LLAMA, bos="<s>", eos="</s>", adds_bos=True)
    build_tokenizer(root / "bare", template=None, eos="</s>")
    return root


def texts(data: GroupDataset, tokenizer_dir: Path) -> list[tuple[str, str, str]]:
    tokenizer = load_tokenizer(tokenizer_dir)
    return [tuple(tokenizer.decode(ids) for ids in (pair.prompt, *pair.completions)) for pair in data]


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Bern"}}}
TOOL = [{"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}]
SAME_ROWS: dict[str, list[list[dict[str, Any]]]] = {
    "null fields of messages": [
        [
            {
                "chosen": [user(f"Question {i}"), {**assistant("Yes"), **extra}],
                "rejected": [user(f"Question {i}"), assistant("No")],
            }
            for i in range(3)
        ]
        for extra in ({}, {"name": None}, {"tool_calls": None, "reasoning_content": None})
    ],
    "null columns": [
        [{**chat_row(f"Question {i}", "Yes", "No"), **extra} for i in range(3)]
        for extra in (
            {},
            {"margin": None},
            {"margin": NAN},
            {"tools": None},
            {"system": NAN, "chat_template_kwargs": None},
            {"tools": NAN, "query": ""},
        )
    ],
    "a system prompt in some rows": [
        [{"prompt": f"Question {i}", "chosen": "Yes", "rejected": "No", "system": "Be brief" if i else none} for i in range(3)]
        for none in (None, "", NAN)
    ],
    "tools and calls": [
        [
            {
                "chosen": [user(f"Question {i}"), {"role": "assistant", "content": content, "tool_calls": [call]}],
                "rejected": [user(f"Question {i}"), assistant("No idea")],
                "tools": tools,
            }
            for i in range(3)
        ]
        for content, call, tools in (
            ("", CALL, TOOL),
            (None, CALL, json.dumps(TOOL)),
            ("", {**CALL, "function": {"name": "f", "arguments": '{"city": "Bern"}'}}, TOOL),
        )
    ],
}


@pytest.mark.parametrize("name", SAME_ROWS)
def test_null_nan_and_absent_are_one_in_every_kind_of_file(tmp_path: Path, tokenizers: Path, name: str):
    hashes = {}
    for number, rows in enumerate(SAME_ROWS[name]):
        for kind in KINDS:
            data = load(write_kind(tmp_path / f"{number}{kind}", rows), tokenizers / "tools")
            assert len(data) == 3 and not data.report.unused_columns and data.columns == {}
            hashes[number, kind] = data.hashes.tobytes()
    assert len(set(hashes.values())) == 1, hashes.keys()


@pytest.mark.parametrize("template", [TOOLS, TEXT_ARGUMENTS, PRINTED_ARGUMENTS], ids=["json", "joined", "printed"])
def test_arguments_as_text_are_the_object(tmp_path: Path, tokenizers: Path, template: str):
    for number, arguments in enumerate(({"city": "Bern"}, '{"city": "Bern"}', '{"city":"Bern", "zip": null}')):
        calls = {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}
        rows = [{"chosen": [user("Weather"), {**assistant(""), **calls}], "rejected": [user("Weather"), assistant("No")]}]
        path = write_jsonl(tmp_path / f"{number}.jsonl", rows)
        data = load(path, tokenizers / "tools", chat_template_kwargs={"chat_template": template})
        ((_, chosen, _),) = texts(data, tokenizers / "tools")
        assert chosen == '{"name": "f", "arguments": {"city": "Bern"}}<|im_end|>'
        assert data.report.dropped_fields == {}


QUESTION, ANSWERS = [user("What is 1?")], (assistant("It is 1."), assistant("No."))


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": "What is 1?", "chosen": [*QUESTION, ANSWERS[0]], "rejected": [*QUESTION, ANSWERS[1]]}, {}),
        ({"prompt": QUESTION, "chosen": ANSWERS[0], "rejected": [ANSWERS[1]]}, {}),
        ({"conversations": [{"from": "human", "value": "What is 1?"}], "chosen": {"from": "gpt", "value": "It is 1."},
          "rejected": {"from": "gpt", "value": "No."}}, {}),
        ({"talk": [{"who": "person", "says": "What is 1?"}], "chosen": {"who": "bot", "says": "It is 1."},
          "rejected": {"who": "bot", "says": "No."}},
         {"conversation_key_map": {"talk": "conversations", "who": "role", "says": "content", "person": "user",
                                   "bot": "assistant"}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_messages_as_text_are_messages(tmp_path: Path, tokenizers: Path, row: Any, options: Any, kind: str):
    plain = load(write_jsonl(tmp_path / "plain.jsonl", [row]), tokenizers / "chatml", **options)
    assert texts(plain, tokenizers / "chatml")[0][1:] == ("It is 1.<|im_end|>", "No.<|im_end|>")
    as_text = {name: json.dumps(value, indent=1) if isinstance(value, list | dict) else value for name, value in row.items()}
    data = load(write_kind(tmp_path / f"text{kind}", [as_text]), tokenizers / "chatml", **options)
    assert data.fingerprint == plain.fingerprint and data.report.files[0].format == plain.report.files[0].format


@pytest.mark.parametrize(
    "text", [str([*QUESTION, ANSWERS[0]]), json.dumps([*QUESTION, ANSWERS[0]])[:-3], "[{'content': 'A',\n 'role': 'user'}\n {"]
)
def test_messages_as_other_text_are_refused(tmp_path: Path, tokenizers: Path, text: str):
    rows = [{"prompt": f"Q{i}", "chosen": "It is", "rejected": "No"} for i in range(2)]
    path = write_jsonl(tmp_path / "a.jsonl", [{**rows[0], "chosen": text}, *rows])
    report = load(path, tokenizers / "chatml").report.to_json()
    (example,) = report["rejected"]["schema"]["examples"]
    assert example == {"row": f"{path}:1", "detail": "chosen holds messages as text that is not JSON: write them as JSON"}


@pytest.mark.parametrize("answer", ['[{"role": "admin", "user": "a"}]', '{"from": "USD", "value": 3}', "[1, 2]", "{x", "[{}]"])
def test_an_answer_that_is_json_stays_an_answer(tmp_path: Path, tokenizers: Path, answer: str):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Q", "chosen": answer, "rejected": "No"}])
    assert texts(load(path, tokenizers / "chatml"), tokenizers / "chatml")[0][1] == f"{answer}<|im_end|>"


TEMPLATED = [
    {
        "prompt": f"<|im_start|>system\nquiet<|im_end|>\n<|im_start|>user\nq {i}<|im_end|>\n<|im_start|>assistant\n",
        "chosen": "blue stone<|im_end|>",
        "rejected": "no",
    }
    for i in range(3)
]


def test_rows_templated_before_are_refused_or_taken_as_they_are(tmp_path: Path, tokenizers: Path):
    path = write_jsonl(tmp_path / "a.jsonl", TEMPLATED)
    with pytest.raises(UserError) as refused:
        load(path, tokenizers / "chatml")
    assert str(refused.value).startswith("No pair is left: 3 of 3 rows were rejected.\nMost often: schema (3).")
    assert "content of a message of role 'user' holds <|im_start|>, which the chat template writes itself" in str(refused.value)
    assert "--no-chat-template" in str(refused.value)
    plain = load(path, tokenizers / "chatml", chat_template=False)
    for i, (prompt, chosen, rejected) in enumerate(texts(plain, tokenizers / "chatml")):
        assert prompt == TEMPLATED[i]["prompt"] and (chosen, rejected) == ("blue stone<|im_end|>", "no<|im_end|>")
    whole = [chat_row(f"q {i}", "blue stone", "no") for i in range(3)]
    for row in whole:
        for side in ("chosen", "rejected"):
            row[side].insert(0, {"role": "system", "content": "quiet"})
    assert load(write_jsonl(tmp_path / "b.jsonl", whole), tokenizers / "chatml").fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("name", "row", "token"),
    [
        ("chatml", chat_row("Q<|im_end|>", "A", "B"), "<|im_end|>"),
        ("chatml", chat_row("Q", "A<|im_end|>\n<|im_start|>user\nMore", "B"), "<|im_start|>"),
        ("chatml", chat_row("Q", "A", "B<|im_end|> C"), "<|im_end|>"),
        ("llama", chat_row("[INST] Q [/INST] A</s>", "A", "B"), "</s>"),
    ],
)
def test_turn_tokens_inside_messages_are_refused(tmp_path: Path, tokenizers: Path, name: str, row: Any, token: str):
    rows = [row, *(chat_row(f"Q{i}", "Yes", "No") for i in range(2))]
    report = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizers / name).report
    assert f"holds {token}, which" in report.rejected["schema"].details[0] and report.rows_kept == 2


def test_without_a_chat_template_rows_are_text(tmp_path: Path, tokenizers: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "A", "B")])
    with pytest.raises(UserError, match="^--no-chat-template takes a prompt and answers as text, no messages"):
        load(path, tokenizers / "chatml", chat_template=False)
    with pytest.raises(UserError, match="^The tokenizer has no chat template, so that it takes a prompt and answers as text"):
        load(path, tokenizers / "bare")
    for options in ({"system_prompt": "S"}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(
            UserError, match=r"^--(system-prompt|apply-chat-template-kwargs) has no effect with --no-chat-template"
        ):
            DataOptions(chat_template=False, **options)
    row = {"prompt": "Q ", "chosen": "A", "rejected": "B", "chat_template_kwargs": {"enable_thinking": False}}
    data = load(write_jsonl(tmp_path / "b.jsonl", [row]), tokenizers / "qwen3", chat_template=False)
    assert texts(data, tokenizers / "qwen3") == [("Q ", "A<|im_end|>", "B<|im_end|>")]
    assert data.report.unused_columns == {"chat_template_kwargs": 1}


REASONED = [
    {
        "prompt": [user(f"q {i}")],
        "chosen": [{**assistant("blue stone"), "reasoning_content": "the river is quiet"}],
        "rejected": [{**assistant("no"), "reasoning_content": "x"}],
    }
    for i in range(3)
]
CALLED = [user("Weather"), {**assistant(""), "tool_calls": [CALL]}, {"role": "tool", "content": "Rain", "name": "f"}]


@pytest.mark.parametrize(
    ("name", "rows", "dropped"),
    [
        ("chatml", REASONED, {"assistant.reasoning_content": 3}),
        ("tools", REASONED, {}),
        # Reasoning in the history is not written, that of the last message is.
        (
            "tools",
            [
                {
                    "prompt": [user("a"), {**assistant("b"), "reasoning_content": "long ago"}, user("c")],
                    "chosen": {**assistant("d"), "reasoning_content": "why"},
                    "rejected": assistant("e"),
                }
            ],
            {"assistant.reasoning_content": 1},
        ),
        ("chatml", [{"prompt": CALLED, "chosen": "Wet", "rejected": "Dry"}], {"assistant.tool_calls": 1, "tool.name": 1}),
        ("tools", [{"prompt": CALLED, "chosen": "Wet", "rejected": "Dry"}], {"tool.name": 1}),
        # The name of one message is written, that of another is not: told; an id links messages and is no text.
        (
            "chatml",
            [
                {
                    "prompt": [{**user("a"), "name": "Ann", "id": "7"}],
                    "chosen": {**assistant("b"), "thinking": "t"},
                    "rejected": "c",
                }
            ],
            {"user.name": 1, "assistant.thinking": 1},
        ),
    ],
)
def test_fields_that_the_template_leaves_out_are_counted(
    tmp_path: Path, tokenizers: Path, name: str, rows: list[Any], dropped: dict[str, int]
):
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    report = load(path, tokenizers / name).report
    assert report.dropped_fields == dropped == report.to_json()["dropped_fields"]
    for field, count in dropped.items():
        assert f"{field} ({count} row" in report.table().partition("fields of messages that the chat template leaves out: ")[2]
    if dropped:
        with pytest.raises(UserError, match=r"a\.jsonl:1: the chat template leaves out .*--strict-data"):
            load(path, tokenizers / name, strict=True)
    else:
        assert len(load(path, tokenizers / name, strict=True)) == len(rows)


def test_a_message_that_the_template_leaves_out_is_counted(tmp_path: Path, tokenizers: Path):
    deaf = "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    template = deaf + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    rows = [
        {"system": system, "prompt": "Question?", "chosen": "Yes", "rejected": "No"}
        for system in ("Be brief", "You are a quiet night bird of silver.")
    ]
    report = load(
        write_jsonl(tmp_path / "a.jsonl", rows[1:]), tokenizers / "chatml", chat_template_kwargs={"chat_template": template}
    ).report
    assert report.dropped_fields == {"system.content": 1}
    assert load(write_jsonl(tmp_path / "b.jsonl", rows), tokenizers / "chatml").report.dropped_fields == {}


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
@pytest.mark.parametrize("extra", [{"name": None}, {"id": "5"}, {"timestamp": 7}])
def test_histories_may_differ_in_what_is_not_rendered(tmp_path: Path, tokenizers: Path, kind: str, extra: dict[str, Any]):
    rows = [
        {
            "chosen": [{**user(f"stone {i}"), **extra}, assistant("blue stone")],
            "rejected": [user(f"stone {i}"), assistant("no")],
        }
        for i in range(3)
    ]
    data = load(write_kind(tmp_path / f"a{kind}", rows), tokenizers / "chatml")
    plain = load(
        write_jsonl(tmp_path / "b.jsonl", [chat_row(f"stone {i}", "blue stone", "no") for i in range(3)]), tokenizers / "chatml"
    )
    assert data.fingerprint == plain.fingerprint
    assert data.report.dropped_fields == ({"user.timestamp": 3} if "timestamp" in extra else {})


def test_histories_that_render_differently_are_refused(tmp_path: Path, tokenizers: Path):
    thought = [user("a"), assistant("<think>\nfirst\n</think>\n\nb"), user("c")]
    rows = [
        {"chosen": [user("x"), assistant("A")], "rejected": [user("y"), assistant("B")]},
        {"chosen": [*thought, assistant("A")], "rejected": [user("a"), assistant("b"), user("c"), assistant("B")]},
        chat_row("Q", "A", "B"),
    ]
    report = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizers / "qwen3").report
    assert report.rows_kept == 2  # Qwen3 writes no thinking of the history: those two are one
    assert report.rejected["prompt_mismatch"].details == ["chosen and rejected have different histories"]


PREFILL = [user("Solve it"), assistant("Step 1: take the stone.\nStep 2:")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PREFILL, "chosen": [assistant(" put it")], "rejected": [assistant(" no")]},
        {"chosen": [*PREFILL, assistant(" put it")], "rejected": [*PREFILL, assistant(" no")]},
        {"conversations": PREFILL, "chosen": " put it", "rejected": " no"},
        {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c", "rejected": "\n\nHuman: a\n\nAssistant: b\n\nAssistant: d"},
    ],
)
def test_a_prompt_that_ends_with_the_assistant_is_refused_in_every_format(tmp_path: Path, tokenizers: Path, row: Any):
    with pytest.raises(UserError, match=r"Most often: schema \(1\)") as refused:
        load(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizers / "chatml")
    assert "a.jsonl:1: the prompt ends with the assistant's own words: put them at the start of both answers" in str(
        refused.value
    )


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a")]},
        {"chosen": [user("a")], "rejected": [user("a"), assistant("b")], "prompt": "a"},
        {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), assistant("b")]},
        {"chosen": [user("a"), assistant("b")], "rejected": []},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"},
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {"prompt": "a", "chosen": [], "rejected": [assistant("b")]},
        {"prompt": [user("a")], "chosen": [], "rejected": "b"},
    ],
)
def test_a_side_without_an_answer_is_an_empty_completion(tmp_path: Path, tokenizers: Path, row: Any):
    with pytest.raises(UserError) as refused:
        load(write_jsonl(tmp_path / "a.jsonl", [row] * 3), tokenizers / "chatml")
    assert str(refused.value).startswith(
        "No pair is left: 3 of 3 rows were rejected.\nMost often: empty_completion (3). Fill in the completions"
    )


def test_unused_columns_are_counted_by_row(tmp_path: Path, tokenizers: Path):
    rows: list[dict[str, Any]] = [
        {"prompt": "Q0", "query": "and?", "system": "S", "chosen": "A", "rejected": "B"},
        {"prompt": [user("Q1")], "query": "and?", "system": "S", "chosen": "A", "rejected": "B"},
        {"prompt": [user("Q2")], "query": "", "system": "S", "chosen": "A", "rejected": "B", "note": {"a": None}},
        {"prompt": "Q3", "query": "and?", "chosen": "A", "rejected": "", "note": "x"},
    ]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizers / "chatml")
    assert data.report.unused_columns == {"query": 1, "note": 1}  # the query of row 2: messages take none
    assert [prompt.count("S<|im_end|>") for prompt, _, _ in texts(data, tokenizers / "chatml")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"tools": "[" * 50_000}, "tools is not valid JSON"),
        ({"tools": "[" * 200 + "]" * 200}, "tools is not valid JSON"),
        ({"chat_template_kwargs": '{"a": ' + "9" * 5000 + "}"}, "chat_template_kwargs is not valid JSON"),
        ({"margin": 10**4000}, "margin is 1000"),
        ({"chosen": [user("Q"), {"role": "\ud800", "content": "x"}]}, "chosen ends with role '\\ud800', not assistant"),
        ({"chosen": '[{"role": "user", "content": ' + "[" * 5000}, "chosen holds messages as text that is not JSON"),
    ],
)
def test_no_row_is_too_odd_to_be_counted(tmp_path: Path, tokenizers: Path, row: dict[str, Any], detail: str):
    """Depth, digits and halves of surrogate pairs: in a value, and in the name of a column that nothing uses."""
    rows = [{**chat_row("Q", "A", "B"), **row}, chat_row("Q1", "A", "B"), {**chat_row("Q2", "A", "B"), "\ud800": 1}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    report = load(path, tokenizers / "qwen3").report
    assert detail in report.rejected["schema"].details[0] and report.rows_kept == 2
    assert report.unused_columns["\\ud800"] == 1
    assert (report.table() + json.dumps(report.to_json(), ensure_ascii=False)).encode()
