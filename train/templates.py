"""Which chat template a run uses, and what it can print: the model's own, TRL's for a known family, else ChatML."""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template
from trl import chat_template_utils as trl_templates

from train import model
from train.config import Config
from train.turns import Row

# ChatML without a token of its own: a turn ends with the end-of-sequence token, which every base model knows. Markers
# of chat tokens that a base model never saw would stay untrained, <|im_end|> and <|eot_id|> among them.
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
FAMILIES = {
    "cohere": trl_templates.cohere_chat_template,
    "cohere2": trl_templates.cohere2_chat_template,
    "deepseek_v3": trl_templates.deepseekv3_chat_template,
    "gemma": trl_templates.gemma_chat_template,
    "gemma2": trl_templates.gemma_chat_template,
    "gemma3_text": trl_templates.gemma3_chat_template,
    "glm4_moe": trl_templates.glm4moe_chat_template,
    "gpt_oss": trl_templates.gptoss_chat_template,
    "lfm2": trl_templates.lfm2_chat_template,
    "llama": trl_templates.llama3_chat_template,
    "phi3": trl_templates.phi3_chat_template,
    "qwen2": trl_templates.qwen2_5_chat_template,
    "qwen3": trl_templates.qwen3_chat_template,
}
# Some templates print the day; a run repeated on another day is to read the same tokens. Llama 3's own default.
TODAY = date(2024, 7, 26)
QUESTION, ANSWER, NEXT, SYSTEM, TOOL = "plumquestion", "plumanswer", "plumnext", "plumsystem", "plumtool"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": TOOL, "description": "", "parameters": {"type": "object", "properties": {}}},
}
PROBE_CALL = {"type": "function", "function": {"name": TOOL, "arguments": {"plum": "x"}}}


@dataclass
class ChatTemplate:
    """A tokenizer's chat template with what probing it has shown.

    Args:
        stop_ids: tokens at which the model, as it comes, stops generating. The token that ends the last turn joins them.

    `last` and `mid` are the tokens, as text, that end an assistant turn at the end of a chat and within it, if any.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: set[int]
    typed_parts: bool = False  # content must be a list of typed parts
    takes_system: bool = False
    takes_tools: bool = False
    takes_calls: bool = False
    takes_results: bool = False  # of tools
    calls_as_text: bool = False  # the arguments of a call must be JSON text
    last: str | None = None
    mid: str | None = None
    special: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        added = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        named = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        # Some tokenizers add runs of blanks as tokens; those end nothing.
        self.special = {token: number for token, number in (added | named).items() if token.strip()}
        self._pattern = _any_of(self.special)
        control = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        self._control = _any_of(control | named.keys())
        asked, answered = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
        self.typed_parts = QUESTION not in self._try([asked, answered])
        self.takes_system = SYSTEM in self._try([{"role": "system", "content": SYSTEM}, asked, answered])
        self.takes_tools = TOOL in self._try([asked, answered], [PROBE_TOOL])
        self._probe_calls(asked, answered)
        self.last = self._end(self._try([asked, answered]))
        if self.last:
            self.stop_ids = self.stop_ids | {self.special[self._specials(self.last)[-1]]}
        between = self._try([asked, answered, asked | {"content": NEXT}, answered]).partition(NEXT)[0]
        self.mid = self._end(between)
        opens_next = self._specials(between.rpartition(ANSWER)[2]) == [self.mid] and self.mid != self.last
        if self.mid and opens_next and self.special[self.mid] not in self.stop_ids:
            self.mid = None

    def _probe_calls(self, asked: Row, answered: Row) -> None:
        called = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
        observed = {"role": "tool", "name": "", "content": NEXT}
        for self.calls_as_text in (False, True):
            text = self._try([asked, called, observed, answered])
            self.takes_calls = TOOL in text
            self.takes_results = NEXT in (text or self._try([asked, observed, answered]))
            if self.takes_calls:
                return
        self.calls_as_text = False

    def has_special(self, content: str) -> bool:
        """Whether a text has a control token in it, such as one that ends a turn."""
        return self._control.search(content) is not None

    def render(self, messages: list[Row], tools: list[Row] | None = None, prompt: bool = False) -> str:
        """The chat as text; with `prompt`, up to where the model answers.

        Raises:
            jinja2.TemplateError: the template refuses the chat.
        """
        turns = [{key: value for key, value in message.items() if key != "learned"} for message in messages]
        if self.calls_as_text:
            turns = [turn | {"tool_calls": list(map(_as_text, turn["tool_calls"]))} if "tool_calls" in turn else turn
                     for turn in turns]  # fmt: skip
        if self.typed_parts:
            turns = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        described: Any = tools
        try:
            source = self.tokenizer.get_chat_template(tools=described)
            _compile_jinja_template(source).environment.globals["strftime_now"] = TODAY.strftime
            rendered = self.tokenizer.apply_chat_template(
                turns, described, add_generation_prompt=prompt, tokenize=False
            )
            return str(rendered)
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _try(self, messages: list[Row], tools: list[Row] | None = None) -> str:
        try:
            return self.render(messages, tools)
        except TemplateError:
            return ""

    def _end(self, text: str) -> str | None:
        """What follows the answer up to the token at which generation stops, else one special token, else None."""
        rest = text.rpartition(ANSWER)[2].lstrip() if ANSWER in text else ""
        following: list[str] = []
        for token in self._specials(rest):
            if not rest.startswith("".join([*following, token])):
                break
            following.append(token)
            if self.special[token] in self.stop_ids:
                return "".join(following)
        return following[0] if following else None

    def _specials(self, text: str) -> list[str]:
        """The special tokens in a text, in order."""
        return self._pattern.findall(text)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first if token))


def _as_text(call: Row) -> Row:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def of_model(
    config: Config, tokenizer: PreTrainedTokenizerBase, architecture: PretrainedConfig
) -> tuple[ChatTemplate, GenerationConfig, str]:
    """The chat template of the base, generation settings that stop where it ends an answer, and whence it comes."""
    generation = model.generation_config(config, tokenizer)
    template, why = choose(tokenizer, architecture.model_type, generation.eos_token_id)
    generation.eos_token_id = sorted(template.stop_ids)
    return template, generation, why


def choose(tokenizer: PreTrainedTokenizerBase, model_type: str, stop_ids: Collection[int]) -> tuple[ChatTemplate, str]:
    """Give the tokenizer a chat template where it has none, and probe it.

    Args:
        model_type: the architecture, as config.json names it.
        stop_ids: tokens at which the model, as it comes, stops generating.

    Returns:
        The template, and where it comes from.
    """
    stops = set(stop_ids)
    if tokenizer.chat_template is not None:
        return ChatTemplate(tokenizer, stops), "the chat template is the model's own"
    if known := FAMILIES.get(model_type):
        tokenizer.chat_template = known
        template = ChatTemplate(tokenizer, stops)
        # A base model has the family's markers in its vocabulary but never saw them: it stops at none of them.
        if template.last and template.stop_ids == stops:
            return template, f"the model has no chat template: TRL's for {model_type} is used and saved with it"
    starts_with_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = ("{{ bos_token }}" if starts_with_bos else "") + CHATML
    why = f"the model has no chat template: ChatML, each turn ended by {tokenizer.eos_token}, is used and saved with it"
    return ChatTemplate(tokenizer, stops), why
