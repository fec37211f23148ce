"""The adapter: made, kept in float32, saved, and the proof that what was saved is what was trained."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from transformers import GenerationConfig, PreTrainedTokenizerBase

from train.config import Config
from train.console import Refusal

PROOF_TOKENS = 64  # of one row: every layer has its say, and the logits stay small whatever the vocabulary
ROUNDING_STEPS = 8  # of the number format at the greatest logit: what two runs through the same layers may differ by
SAVED = "saved"  # PEFT's name for the adapter as it comes back from disk


def lora(config: Config, targets: str | list[str]) -> LoraConfig:
    """The adapter that the settings describe, on the layers that `check_targets` found."""
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        revision=config.model_revision,  # of the base: whoever loads the adapter gets the same weights
        task_type="CAUSAL_LM",
    )


def summary(adapted: Any) -> str:
    """What got an adapter, by name and number, and the share of the parameters that is trained."""
    counts = Counter(name.rpartition(".")[2] for name in adapted.targeted_module_names)
    counts.update(".".join(name.split(".")[-2:]) for name in adapted.targeted_parameter_names)
    listed = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    total = adapted.num_parameters()
    return f"{listed}; {trained:,} of {total:,} parameters are trained ({100 * trained / total:.2f} %)"


def adapter_in_float32(model: torch.nn.Module) -> None:
    """Keep what is trained in float32: bf16 loses small updates, and a resumed run would not be byte-equal."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def trained_is_finite(model: torch.nn.Module) -> bool:
    """Whether every trained weight is a number."""
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters() if parameter.requires_grad)


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of a row's first tokens, on the CPU, in the base's own type without autocast.

    Args:
        model: the base, or the PeftModel around it; it is left in evaluation mode.
    """
    # The trainer wraps autocast around the outermost forward; the untouched base has none.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.eval()
    given = torch.tensor([ids[:PROOF_TOKENS]], device=inner.device)
    return inner(input_ids=given, use_cache=False).logits[0].cpu()


def save(adapted: Any, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, folder: Path) -> None:
    """Write adapter, tokenizer with template, and generation settings into a new folder."""
    for described in adapted.peft_config.values():
        # PEFT keeps sets, in another order each run.
        described.target_modules = sorted(described.target_modules)
        if described.target_parameters:
            described.target_parameters = sorted(described.target_parameters)
    # "auto" would ask the Hub whether the vocabulary has grown: no token is ever added here.
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    tokenizer.save_pretrained(str(folder))
    generation.save_pretrained(str(folder))


def prove(adapted: Any, folder: Path, ids: list[int], untouched: torch.Tensor) -> float:
    """Prove that the saved adapter, loaded on the untouched base, is the model that was trained.

    Three things are compared: the base under the trained adapter with the base before training, by its logits; every
    tensor read back from disk with the one in memory, bit for bit; and the logits of the model with the adapter read
    back, through PEFT's own loading of settings and tensors, with those of the trained model. No second base is loaded.

    Args:
        folder: the saved adapter.
        ids: a row; its first PROOF_TOKENS tokens are read.
        untouched: `logits` of the base on that row, taken before training.

    Returns:
        The greatest difference between logits of the trained and of the saved adapter; 0 where arithmetic repeats.

    Raises:
        Refusal: they differ by more than rounding.
    """
    trained = logits(adapted, ids)
    step = torch.finfo(adapted.get_input_embeddings().weight.dtype).eps
    with adapted.disable_adapter():
        _refuse_apart("the base has changed under the adapter", untouched, logits(adapted, ids), step)
    (name,) = adapted.active_adapters
    adapted.load_adapter(str(folder), adapter_name=SAVED, torch_device="cpu")
    there, here = (
        get_peft_model_state_dict(adapted, adapter_name=n, save_embedding_layers=False) for n in (SAVED, name)
    )
    if wrong := [key for key in here.keys() | there.keys() if not _same(here.get(key), there.get(key))]:
        raise _not_the_trained(f"{len(wrong)} of its {len(here)} tensors differ, such as {min(wrong)}")
    adapted.set_adapter(SAVED)
    difference = _refuse_apart("the saved adapter computes something else", trained, logits(adapted, ids), step)
    adapted.set_adapter(name)
    adapted.delete_adapter(SAVED)
    return difference


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _refuse_apart(what: str, expected: torch.Tensor, found: torch.Tensor, step: float) -> float:
    """The greatest difference of two sets of logits; refused where it is more than rounding, or no number."""
    differ = expected != found
    difference = float((expected - found)[differ].abs().max()) if bool(differ.any()) else 0.0
    allowed = ROUNDING_STEPS * step * float(expected.abs().max())
    if not difference <= allowed:
        raise _not_the_trained(f"{what}: logits differ by up to {difference:.3g}, rounding explains {allowed:.1g}")
    return difference


def _not_the_trained(why: str) -> Refusal:
    return Refusal(
        f"the saved adapter, loaded on the untouched base, is not the trained model: {why}; nothing was saved as final",
        "keep adapter.partial and the checkpoints in OUTPUT_DIR, report this with run.json, and try other TARGET_MODULES",
    )
