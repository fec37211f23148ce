"""Settings that are each allowed and contradict each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.config import Config


def of(config: "Config") -> list[str]:
    """Every contradiction, each with the way out."""
    return [*_in_data(config), *_in_evaluation(config), *_in_length(config)]


def _in_data(config: "Config") -> Iterator[str]:
    for of in ("dataset", "eval_dataset"):
        wanted = len(getattr(config, of))
        for name in (f"{of}_config", f"{of}_revision", f"{of}_split"):
            if (given := len(getattr(config, name))) > 1 and given != wanted:
                yield f"{name.upper()} has {given} values for {wanted} of {of.upper()}: give one for all, or one each"
    if config.dataset_weights and len(config.dataset_weights) != len(config.dataset):
        yield (
            f"DATASET_WEIGHTS has {len(config.dataset_weights)} values for {len(config.dataset)} of DATASET: "
            "give one each"
        )
    if config.eval_fraction and any(weight > 1 for weight in config.dataset_weights):
        yield "EVAL_FRACTION would hold out copies that DATASET_WEIGHTS above 1 makes: give EVAL_DATASET, or other weights"
    if config.prompt_template and config.prompt_column:
        yield "PROMPT_TEMPLATE and PROMPT_COLUMN both make the question: give one of them"
    if config.streaming and not config.max_rows:
        yield "STREAMING needs MAX_ROWS: how many rows to read of each dataset"


def _in_evaluation(config: "Config") -> Iterator[str]:
    if config.eval_dataset and config.eval_fraction:
        yield "EVAL_DATASET and EVAL_FRACTION both name evaluation rows: give one of them"
    if config.early_stopping_patience and not config.evaluates:
        yield "EARLY_STOPPING_PATIENCE needs evaluation rows: set EVAL_FRACTION or EVAL_DATASET"
    if config.eval_steps and not config.evaluates:
        yield "EVAL_STEPS needs evaluation rows: set EVAL_FRACTION or EVAL_DATASET"
    keeps_best = config.evaluates and config.load_best_model_at_end
    if keeps_best and config.save_steps and (not config.eval_steps or config.save_steps % config.eval_steps):
        yield (
            "SAVE_STEPS must be a multiple of EVAL_STEPS to keep the best checkpoint: "
            "leave SAVE_STEPS out, or set LOAD_BEST_MODEL_AT_END=false"
        )


def _in_length(config: "Config") -> Iterator[str]:
    per_device, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if config.max_steps and "num_train_epochs" in config.model_fields_set:
        yield "MAX_STEPS and NUM_TRAIN_EPOCHS both say when to stop: give one of them"
    if per_device and accumulation:
        product = per_device * accumulation
        if "effective_batch_size" in config.model_fields_set and product != config.effective_batch_size:
            yield (
                f"PER_DEVICE_TRAIN_BATCH_SIZE × GRADIENT_ACCUMULATION_STEPS is {product}, "
                f"EFFECTIVE_BATCH_SIZE is {config.effective_batch_size}: leave one of the three out"
            )
    elif config.effective_batch_size % (per_device or accumulation or 1):
        name = "PER_DEVICE_TRAIN_BATCH_SIZE" if per_device else "GRADIENT_ACCUMULATION_STEPS"
        yield f"{name}={per_device or accumulation} does not divide EFFECTIVE_BATCH_SIZE={config.effective_batch_size}"
