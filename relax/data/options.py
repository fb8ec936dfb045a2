"""What turns rows into token ids: limits, columns, template options. One frozen value that workers and the cache share.

Invariant: two equal `DataOptions` over the same files and tokenizer give the same bytes, so `identity()` (every field)
is part of the cache key.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from relax.errors import UserError

INSTRUCTION = "alpaca_instruction"  # the row format of one completion that nothing is said of
OversizeStrategy = Literal["keep", "skip", "truncate_left", "truncate_right"]

# Arguments of apply_chat_template that the pipeline itself sets; a template must not receive them from outside.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
        "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
# One template, which an export holds, and one day for all rows: a row of a data file chooses neither.
ROW_RESERVED_TEMPLATE_KWARGS = RESERVED_TEMPLATE_KWARGS | {"chat_template", "strftime_now"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Options of one data set; names follow the flags. Raises `UserError` naming the flag when a value cannot work.

    `max_length`, `max_completion_length`, `max_tokens` are tokens per row: prompt + longest completion, one completion,
    and the micro-batch budget. Keys of None mean the usual column name. `whole_render` keeps the template's whole
    render (reward model); without it a completion stops at its end-of-turn token (DPO). `reads`: the columns of
    `relax.data.columns` that the objective reads.
    `conversation_key_map` maps names found in the file (columns, message fields, roles) to ours. Training drops a pair
    that came before; whoever asks for scores of rows keeps every row (`drop_duplicates=False`). `chat_template=False`
    takes prompt and completions as they are, between BOS and end token.

    Preprocessing sets the last three. `to_file`: a completion keeps both readings (see `render.GroupIds`), and a row with a
    side longer than `max_length` is dropped rather than cut. `row_formats`: the formats that rows may have (none: any).
    `map_keys`: the column that plays a part, "" where none shall.
    """

    max_length: int = 1024
    max_completion_length: int = 512
    max_tokens: int = 8192
    oversize_strategy: OversizeStrategy = "keep"
    whole_render: bool = False
    reads: tuple[str, ...] = ()
    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    pair_id_key: str | None = None
    conversation_key_map: dict[str, str] | None = field(default_factory=dict)
    tool_key: str | None = None
    system_prompt: str | None = None
    chat_template: bool = True
    chat_template_kwargs: dict[str, Any] | None = field(default_factory=dict)
    strict: bool = False
    drop_duplicates: bool = True
    to_file: bool = False
    row_formats: tuple[str, ...] = ()
    map_keys: dict[str, str] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, flag in _LIMIT_FLAGS.items():
            if getattr(self, name) < 1:
                raise UserError(f"{flag} is {getattr(self, name)}: it must be at least 1 token.")
        if self.max_completion_length >= self.max_length:
            raise UserError(
                f"--preference-max-completion-length {self.max_completion_length} must be smaller than "
                f"--preference-max-length {self.max_length}: no room would be left for the prompt."
            )
        if self.oversize_strategy not in get_args(OversizeStrategy):
            raise UserError(
                f"--sft-oversize-strategy {self.oversize_strategy!r} is not one of {', '.join(get_args(OversizeStrategy))}."
            )
        if reserved := RESERVED_TEMPLATE_KWARGS & set(self.template_kwargs):
            raise UserError(f"--apply-chat-template-kwargs cannot set {', '.join(sorted(reserved))}: relax sets it itself.")
        if not isinstance(self.template_kwargs.get("chat_template") or "", str):
            raise UserError("--apply-chat-template-kwargs: chat_template must be text, a Jinja template or the name of one.")
        if not self.chat_template:
            flags = {"--apply-chat-template-kwargs": self.template_kwargs, "--system-prompt": self.system_prompt}
            for flag, given in flags.items():
                if given:
                    raise UserError(f"{flag} has no effect with --no-chat-template: leave one of them out.")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}

    @property
    def single_completion(self) -> bool:
        """Rows are instructions."""
        return self.row_formats == (INSTRUCTION,)

    @property
    def key_map(self) -> dict[str, str]:
        return self.conversation_key_map or {}

    def identity(self) -> str:
        """Every field as canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, ensure_ascii=False)


_LIMIT_FLAGS = {
    "max_length": "--preference-max-length",
    "max_completion_length": "--preference-max-completion-length",
    "max_tokens": "--max-tokens-per-gpu",
}
