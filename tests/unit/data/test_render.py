"""Rendering: whole renders, one shared prompt, one end token, no doubled BOS, and a tokenizer that proves itself first."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax.data.encoding import Renders, cut_token, encode_renders, encode_texts
from relax.data.options import DataOptions
from relax.data.render import GroupEncoder, GroupIds, common_prefix
from relax.data.rows import Group, Message, PlainText, RowRejected
from relax.data.tokenizer import leading_special_ids, load_tokenizer, probe_template
from relax.errors import UserError
from tests.unit.data.samples import CHATML, LLAMA, QWEN3, assistant, build_tokenizer, user


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("tokenizers")
    build_tokenizer(root / "chatml", template=CHATML, bos="<|im_start|>")  # SmolLM2's odd bos_token
    build_tokenizer(root / "qwen3", template=QWEN3)
    build_tokenizer(root / "llama", template=LLAMA, bos="<s>", eos="</s>", adds_bos=True)
    build_tokenizer(root / "plain", template=None, bos="<s>", eos="</s>", adds_bos=True)
    build_tokenizer(root / "bare", template=None, eos="</s>")
    yield {path.name: load_tokenizer(path) for path in root.iterdir()}


def encode(tokenizer: Any, *pairs: Group, whole_render: bool = False, **options: Any) -> list[Any]:
    """Pairs as a policy reads them, or a reward model."""
    results = GroupEncoder(tokenizer, options=DataOptions(**options)).encode(pairs)
    return [
        result
        if isinstance(result, RowRejected)
        else replace(
            result,
            completions=tuple(
                ids[:length]
                for ids, length in zip(result.completions, result.rendered if whole_render else result.trained, strict=True)
            ),
        )
        for result in results
    ]


def pair(chosen: str, rejected: str, *, history: tuple[Message, ...] = (user("Q"),), **fields: Any) -> Group:
    return Group(history=history, completions=(assistant(chosen), assistant(rejected)), **fields)


def texts(tokenizer: Any, ids: GroupIds) -> tuple[str, str, str]:
    return tuple(tokenizer.decode(part) for part in (ids.prompt, *ids.completions))


def whole(tokenizer: Any, *messages: Message, **kwargs: Any) -> list[int]:
    return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **kwargs)


def test_chatml_pair(tokenizers: dict[str, Any]):
    tokenizer = tokenizers["chatml"]
    (ids,) = encode(tokenizer, pair("Yes", "No"))
    assert texts(tokenizer, ids) == (
        "<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
        "Yes<|im_end|>",
        "No<|im_end|>",
    )
    assert not ids.shrunk


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama"])
def test_prompt_and_answer_are_the_whole_render_as_at_inference(tokenizers: dict[str, Any], name: str):
    tokenizer = tokenizers[name]
    history = (user("Hello"), assistant("<think>\nhm\n</think>\n\nHi"), user("Sum ("))
    example = pair("46", "$46", history=history)
    (ids,) = encode(tokenizer, example, whole_render=True)
    inference = whole(tokenizer, *history, add_generation_prompt=True)
    assert ids.prompt.tolist() == inference
    for completion, message in zip(ids.completions, example.completions, strict=True):
        assert [*ids.prompt, *completion] == whole(tokenizer, *history, message)
    (cut,) = encode(tokenizer, example)
    end = probe_template(tokenizer, template_kwargs={}).end_id
    assert cut.prompt.tolist() == inference
    for completion, kept in zip(ids.completions, (part.tolist() for part in cut.completions), strict=True):
        assert completion.tolist()[: len(kept)] == kept and kept[-1] == end and kept.count(end) == 1


def test_thinking_in_one_answer_shrinks_the_prompt_against_both(tokenizers: dict[str, Any]):
    tokenizer = tokenizers["qwen3"]
    example = pair("<think>\nwhy\n</think>\n\nYes", "No")
    header = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = encode(tokenizer, example)
    assert texts(tokenizer, ids) == (
        header,
        "<think>\nwhy\n</think>\n\nYes<|im_end|>",
        "<think>\n\n</think>\n\nNo<|im_end|>",
    )
    assert not ids.shrunk
    # Without thinking the generation prompt itself holds an empty block, which the reasoning answer contradicts.
    (ids,) = encode(tokenizer, example, chat_template_kwargs={"enable_thinking": False})
    prompt, chosen, rejected = texts(tokenizer, ids)
    assert prompt.startswith(header) and len(prompt) < len(header + "<think>\n\n</think>\n\n")
    assert prompt + chosen == header + "<think>\nwhy\n</think>\n\nYes<|im_end|>"
    assert prompt + rejected == header + "<think>\n\n</think>\n\nNo<|im_end|>"
    assert ids.shrunk
    (ids,) = encode(tokenizer, pair("Yes", "No", template_kwargs={"enable_thinking": False}))
    assert texts(tokenizer, ids) == (header + "<think>\n\n</think>\n\n", "Yes<|im_end|>", "No<|im_end|>")


def test_tools_reach_the_template(tokenizers: dict[str, Any]):
    (ids,) = encode(tokenizers["qwen3"], pair("Yes", "No", tools=[{"name": "f"}]))
    assert texts(tokenizers["qwen3"], ids)[0].startswith('<|im_start|>system\nTools:{"name": "f"}<|im_end|>')


def test_the_end_token_is_never_doubled(tokenizers: dict[str, Any]):
    for name, end in (("chatml", "<|im_end|>"), ("llama", "</s>"), ("bare", "</s>")):
        text = PlainText("Q", (f"Yes{end}", "No"))
        (ids,) = encode(tokenizers[name], pair(f"Yes{end}", "No", text=text))
        assert [answer.strip() for answer in texts(tokenizers[name], ids)[1:]] == [f"Yes{end}", f"No{end}"]


def test_an_end_token_is_added_where_the_template_writes_none(tokenizers: dict[str, Any]):
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    (ids,) = encode(tokenizers["bare"], pair("Yes", "No"), chat_template_kwargs={"chat_template": template})
    assert texts(tokenizers["bare"], ids)[1:] == ("assistant: Yes\n</s>", "assistant: No\n</s>")


def test_bos_comes_from_template_or_post_processor_and_once(tokenizers: dict[str, Any]):
    start = tokenizers["chatml"].convert_tokens_to_ids("<|im_start|>")
    (ids,) = encode(tokenizers["chatml"], pair("Yes", "No"))
    assert ids.prompt[0] == start and ids.prompt[1] != start
    (ids,) = encode(tokenizers["llama"], pair("Yes", "No"))
    assert texts(tokenizers["llama"], ids)[0] == "<s>[INST] Q [/INST]"
    twice = "{{ bos_token }}" + LLAMA
    (ids,) = encode(tokenizers["llama"], pair("Yes", "No"), chat_template_kwargs={"chat_template": twice})
    assert texts(tokenizers["llama"], ids)[0] == "<s>[INST] Q [/INST]"
    for prompt in ("Sum (", "<s>Sum ("):
        (ids,) = encode(tokenizers["plain"], pair("46", "$46", text=PlainText(prompt, ("46", "$46"))))
        assert texts(tokenizers["plain"], ids) == ("<s>Sum (", "46</s>", "$46</s>")
    (ids,) = encode(tokenizers["bare"], pair("46", "$46", text=PlainText("Sum (", ("46", "$46"))))
    assert texts(tokenizers["bare"], ids) == ("Sum (", "46</s>", "$46</s>")


def test_plain_text_without_a_prompt_is_refused(tokenizers: dict[str, Any]):
    (result,) = encode(tokenizers["bare"], pair("46", "$46", text=PlainText("", ("46", "$46"))))
    assert (result.code, result.detail) == ("prompt_mismatch", "the prompt has no tokens")


def test_messages_need_a_chat_template(tokenizers: dict[str, Any]):
    with pytest.raises(UserError, match="The tokenizer has no chat template, so that it takes"):
        encode(tokenizers["bare"], pair("Yes", "No"))


def test_a_row_that_the_template_refuses_does_not_stop_its_neighbours(tokenizers: dict[str, Any]):
    system = {"role": "system", "content": "S"}
    bad = pair("Yes", "No", history=(system, user("Q")))
    reserved = pair("Yes", "No", template_kwargs={"tokenize": True})
    refused, good, reserved_result = encode(tokenizers["llama"], bad, pair("Yes", "No"), reserved)
    assert refused.code == "schema" and "roles must alternate" in refused.detail
    assert texts(tokenizers["llama"], good)[1] == " Yes</s>"
    assert reserved_result.code == "schema" and "chat_template_kwargs sets tokenize" in reserved_result.detail


def test_a_prompt_that_ends_before_the_assistants_turn_is_refused(tokenizers: dict[str, Any]):
    leaky = "{% if messages[-1]['role'] == 'assistant' %}{{ messages[-1]['content'] }}{% endif %}" + CHATML
    late = CHATML.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{{ '\n' * messages|length }}{% endfor %}")
    for template, code in ((leaky, "prompt_mismatch"), (late, "boundary")):
        (result,) = encode(tokenizers["qwen3"], pair("Yes", "No"), chat_template_kwargs={"chat_template": template})
        assert isinstance(result, RowRejected) and result.code == code


def test_an_answer_that_the_template_drops_is_refused(tokenizers: dict[str, Any]):
    dropping = "{% for m in messages %}{{ m['content'] if m['content'] != 'Yes' else '' }}{% endfor %}"
    (result,) = encode(
        tokenizers["bare"], pair("Yes", "No"), chat_template_kwargs={"chat_template": dropping}, whole_render=True
    )
    assert result.code == "empty_completion"


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize("whole_render", [False, True])
@pytest.mark.parametrize("empty", [assistant("<|im_end|>"), CALL], ids=["end token as text", "tool calls without a place"])
def test_an_answer_of_nothing_but_the_end_token_is_refused(tokenizers: dict[str, Any], whole_render: bool, empty: Message):
    for side, sides in (("chosen", (empty, assistant("No"))), ("rejected", (assistant("Yes"), empty))):
        bad = Group(history=(user("Q"),), completions=sides)
        refused, good = encode(tokenizers["chatml"], bad, pair("Yes", "No"), whole_render=whole_render)
        assert (refused.code, refused.detail) == ("empty_completion", f"{side} renders to no tokens but the end token")
        assert min(map(len, good.completions)) > 1


def test_a_plain_answer_of_nothing_but_the_end_token_is_refused(tokenizers: dict[str, Any]):
    text = PlainText("Q ", ("Yes", "</s>"))
    (result,) = encode(tokenizers["bare"], pair("Yes", "</s>", text=text))
    assert (result.code, result.detail) == ("empty_completion", "rejected renders to no tokens but the end token")


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [1], 0), ([1], [2], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1], [1], 1)]
)
def test_common_prefix(a: list[int], b: list[int], length: int):
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == length


def test_pieces_give_the_ids_of_whole_strings(tokenizers: dict[str, Any]):
    tokenizer = tokenizers["qwen3"]
    cut = probe_template(tokenizer, template_kwargs={}).cut
    assert cut == "<|im_start|>"
    contents = ["one\n\n", "(46)", " <think>", "<|im_start|>assistant\n", "$46 (", "\n\n\n", "é\u200b", "  two  "]
    header = "<|im_start|>assistant\n"
    renders = [
        Renders(f"<|im_start|>user\n{a}<|im_end|>\n{header}", (f"<|im_start|>user\n{a}<|im_end|>\n{header}{b}", other))
        for a in contents
        for b in contents
        for other in (f"<|im_start|>user\n{a}<|im_end|>\n{header}{a}{b}", "something else")
    ]
    for cut_here in (cut, None):
        for render, ids in zip(renders, encode_renders(tokenizer, renders, cut=cut_here), strict=True):
            parts, texts = (ids.history, *ids.wholes), (render.history, *render.wholes)
            assert [part.tolist() for part in parts] == [part.tolist() for part in encode_texts(tokenizer, texts)]


def test_a_token_that_takes_its_neighbours_with_it_is_no_cut():
    def token(**changes: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"content": "<a>", "normalized": False, "lstrip": False, "single_word": False, **changes})

    for changes, expected in [({}, "<a>"), ({"lstrip": True}, None), ({"normalized": True}, None)]:
        assert cut_token(SimpleNamespace(added_tokens_decoder={1: token(**changes)}), "<a>user") == expected
    assert cut_token(SimpleNamespace(added_tokens_decoder={1: token()}), "user") is None


def test_the_post_processors_tokens_are_found(tokenizers: dict[str, Any]):
    assert leading_special_ids(tokenizers["plain"]).tolist() == [tokenizers["plain"].bos_token_id]
    assert leading_special_ids(tokenizers["bare"]).tolist() == []


class Misbehaving:
    """A tokenizer whose template call gives something else than it was asked for."""

    def __init__(self, tokenizer: Any, answer: Any) -> None:
        self._tokenizer, self._answer = tokenizer, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **kwargs: Any) -> Any:
        if tokenize:
            return self._answer
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"input_ids": [1, 2]}, "Self-check failed: apply_chat_template gave dict where a flat list"),
        ([[1, 2]], "Self-check failed: apply_chat_template gave list where a flat list"),
        ([1, 2], "encoding the rendered chat gives other ids"),
    ],
)
def test_self_check_refuses_a_template_call_without_flat_ids(tokenizers: dict[str, Any], answer: Any, message: str):
    with pytest.raises(UserError, match=message):
        GroupEncoder(Misbehaving(tokenizers["qwen3"], answer), options=DataOptions())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "The chat template fails on a plain question and answer: no"),
        ("{{ messages[0]['content'] }}", "leaves the assistant's answer out"),
    ],
)
def test_self_check_refuses_a_template_that_cannot_serve(tokenizers: dict[str, Any], template: str, message: str):
    with pytest.raises(UserError, match=message):
        GroupEncoder(tokenizers["qwen3"], options=DataOptions(chat_template_kwargs={"chat_template": template}))


def test_a_tokenizer_without_any_end_token_is_refused(tmp_path: Path):
    tokenizer = load_tokenizer(build_tokenizer(tmp_path / "t", template=None, eos=None))
    with pytest.raises(UserError, match="has no eos_token"):
        GroupEncoder(tokenizer, options=DataOptions())


def test_tokenizers_that_cannot_be_loaded_are_errors(tmp_path: Path):
    with pytest.raises(UserError, match=r"gone: no such directory \(--hf-checkpoint\)"):
        load_tokenizer(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: no tokenizer there"):
        load_tokenizer(tmp_path / "empty")


def test_code_in_the_model_directory_never_runs(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "t")
    config = directory / "tokenizer_config.json"
    text = config.read_text().replace("{", '{"auto_map": {"AutoTokenizer": [null, "evil.Evil"]},', 1)
    config.write_text(text.replace('"tokenizer_class": "', '"tokenizer_class": "Evil'))
    marker = tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    try:
        load_tokenizer(directory)
    except UserError as error:
        assert "the tokenizer cannot be loaded" in str(error)
    assert not marker.exists()


def test_limits_inside_tokenizer_json_do_not_cut_data(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "t")
    tokenizer = load_tokenizer(directory)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    again = load_tokenizer(directory)
    assert len(encode_texts(again, ["one two three four five six seven"])[0]) == 7
