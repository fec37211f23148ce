"""Answers of an adapter on its untouched base model, and of the base alone."""

from collections.abc import Iterator, Sequence

from peft import PeftModel
from transformers import GenerationConfig

from train import model
from train.config import Config


def generate(
    config: Config, adapter: str, prompts: Sequence[str], max_new_tokens: int, compare: bool
) -> Iterator[tuple[str, str, str]]:
    """Each prompt with the base's answer (empty unless `compare`) and the adapter's, greedily decoded.

    The base is the one the adapter names, loaded as the settings quantise it.

    Raises:
        Refusal: the folder holds no adapter, or its base cannot be loaded.
    """
    described = model.base_of(adapter)
    config = config.model_copy(
        update={"model_id": described.base_model_name_or_path, "model_revision": described.revision}
    )
    dtype, _ = model.compute_dtype(config)
    tokenizer = model.load_tokenizer(config, adapter)
    generation = GenerationConfig.from_pretrained(adapter)
    tuned = PeftModel.from_pretrained(model.load_base(config, dtype), adapter).eval()
    for prompt in prompts:
        before = ""
        if compare:
            with tuned.disable_adapter():
                before = model.answer(tuned, tokenizer, prompt, max_new_tokens, generation)
        yield prompt, before, model.answer(tuned, tokenizer, prompt, max_new_tokens, generation)
