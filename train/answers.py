"""Answers of an adapter on its untouched base model, and of the base alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedTokenizerBase

from train import model
from train.config import Config


def generate(
    config: Config, adapter: str, prompts: Sequence[str], max_new_tokens: int, *, compare: bool, raw: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Each prompt with the base's answer (empty unless `compare`) and the adapter's, greedily decoded.

    The base is MODEL_ID where that is set, else the one the adapter names, loaded as the settings quantise it.

    Args:
        raw: continue the prompt as it stands, as prompt/completion and text rows are trained, without chat template.

    Raises:
        Refusal: the folder holds no adapter, or its base cannot be loaded.
    """
    config, _ = model.with_base_of(config, adapter)
    dtype, _ = model.compute_dtype(config)
    tokenizer = model.load_tokenizer(config, adapter)
    generation = GenerationConfig.from_pretrained(adapter, do_sample=False, max_new_tokens=max_new_tokens)
    tuned = PeftModel.from_pretrained(model.load_base(config, dtype), adapter).eval()
    for prompt in prompts:
        inputs = (_as_it_stands if raw else _as_a_question)(tokenizer, prompt).to(tuned.device)
        before = ""
        if compare:
            with tuned.disable_adapter():
                before = _answer(tuned, tokenizer, inputs, generation)
        yield prompt, before, _answer(tuned, tokenizer, inputs, generation)


def _as_it_stands(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:
    return tokenizer(prompt, return_tensors="pt")


def _as_a_question(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def _answer(tuned: Any, tokenizer: PreTrainedTokenizerBase, inputs: Any, generation: GenerationConfig) -> str:
    """What the model says after the inputs, without special tokens."""
    with torch.no_grad():
        output = tuned.generate(**inputs, generation_config=generation)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
