"""Tokenizer and 4-bit base; the base that an adapter names."""

import os
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from huggingface_hub.errors import HfHubHTTPError
from peft import PeftConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from train.config import Config
from train.console import Exit, Refusal, warn

# The oldest NVIDIA generation with bf16 arithmetic is Ampere.
BF16_CAPABILITY = (8, 0)


def device() -> torch.device:
    """Where the run happens: the first visible GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(config: Config) -> tuple[torch.dtype, str]:
    """Type of the arithmetic, and why.

    Raises:
        Refusal: bfloat16 asked of a GPU without it, or float16 of a CPU.
    """
    on_gpu = device().type == "cuda"
    if on_gpu:
        has_bf16 = torch.cuda.get_device_capability() >= BF16_CAPABILITY
        machine = "{} (compute capability {}.{})".format(
            torch.cuda.get_device_name(), *torch.cuda.get_device_capability()
        )
    else:
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        machine = "this CPU"
    wanted = config.bnb_4bit_compute_dtype
    if wanted == "auto":
        fallback = torch.float16 if on_gpu else torch.float32
        return (
            (torch.bfloat16, f"auto: {machine} has it") if has_bf16 else (fallback, f"auto: {machine} has no bfloat16")
        )
    if (wanted == "bfloat16" and on_gpu and not has_bf16) or (wanted == "float16" and not on_gpu):
        raise Refusal(f"{machine} does not compute in {wanted}", "set BNB_4BIT_COMPUTE_DTYPE=auto", Exit.MACHINE)
    return getattr(torch, wanted), "BNB_4BIT_COMPUTE_DTYPE given"


def _from_hub(load: Any, config: Config, name: str, **options: Any) -> Any:
    """Call a `from_pretrained`, with the Hub's and the file system's refusals put in the user's terms."""
    try:
        return load(name, revision=config.model_revision, trust_remote_code=config.trust_remote_code, **options)
    except (OSError, HfHubHTTPError, ValueError) as error:
        reason = _trouble_with_folder(name) or str(error).strip().splitlines()[0]
        raise Refusal(
            f'model "{name}" cannot be loaded: {reason}',
            "check MODEL_ID and MODEL_REVISION; a gated or private model needs HF_TOKEN and its terms accepted on the "
            "Hub; offline, MODEL_ID must be a local folder or in the cache",
            Exit.MACHINE if isinstance(error, OSError) and not Path(name).is_dir() else Exit.SETTINGS,
        ) from error


def _trouble_with_folder(name: str) -> str | None:
    """What is wrong with a local model folder where the libraries' own words mislead."""
    folder = Path(name)
    if name.startswith(("/", ".")) and not folder.exists():
        return "there is no such folder"
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        return f"user {os.getuid()} may not read {folder}"
    closed = [file for file in sorted(folder.glob("*")) if not os.access(file, os.R_OK)]
    return f"user {os.getuid()} may not read {closed[0]}" if closed else None


def load_model_config(config: Config) -> PretrainedConfig:
    """The base model's architecture, without weights."""
    return _from_hub(AutoConfig.from_pretrained, config, config.model_id)


def load_tokenizer(config: Config, name: str | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or that of the folder `name`. No token is ever added.

    Padding may share the end token: labels are masked by position, never by token.
    """
    tokenizer = _from_hub(AutoTokenizer.from_pretrained, config, name or config.model_id)
    if tokenizer.eos_token_id is None:
        raise Refusal(
            f'the tokenizer of "{config.model_id}" names no end-of-sequence token',
            "choose a model whose tokenizer_config.json has eos_token",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def generation_config(config: Config, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Special tokens for generation: it stops where the base stops, and at the tokenizer's end token.

    The base's sampling settings are left out: some models ship contradictory ones, which cannot be saved again.
    """
    try:
        base = GenerationConfig.from_pretrained(config.model_id, revision=config.model_revision or "main")
    except OSError:  # Not every model ships one.
        base = GenerationConfig.from_model_config(load_model_config(config))
    stops = base.eos_token_id if isinstance(base.eos_token_id, list) else [base.eos_token_id]
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted({stop for stop in [*stops, tokenizer.eos_token_id] if stop is not None}),
        pad_token_id=tokenizer.pad_token_id,
    )


def load_base(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    """The base model on the run's device: linear layers in 4 bits, the rest in `dtype`.

    `prepare_model_for_kbit_training` is left out on purpose: it would turn embeddings, head and norms into float32.
    """
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=dtype,
    )
    model, loading = _from_hub(
        AutoModelForCausalLM.from_pretrained,
        config,
        config.model_id,
        quantization_config=quantisation if config.load_in_4bit else None,
        dtype=dtype,
        device_map={"": device()},
        output_loading_info=True,
    )
    if lost := sorted(loading["missing_keys"]) + sorted(str(key[0]) for key in loading["mismatched_keys"]):
        raise Refusal(
            f'"{config.model_id}" lacks {len(lost)} of the weights its config.json describes, such as {lost[0]}',
            "download the model again; or choose one whose config.json fits its weights",
        )
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # On a CPU with AVX512-BF16 bitsandbytes repacks weights at the first evaluation and never back:
            # gradients through them then vanish without an error.
            module.support_avx512bf16_for_cpu = False
    return model


def with_base_of(config: Config, adapter: str) -> tuple[Config, PeftConfig]:
    """The settings with the adapter's base for MODEL_ID, unless that was given, and the adapter's description.

    Raises:
        Refusal: the folder holds no adapter.
    """
    try:
        described = PeftConfig.from_pretrained(adapter)
    except (ValueError, OSError, HfHubHTTPError) as error:
        raise Refusal(f'"{adapter}" holds no adapter', "give the folder with adapter_config.json") from error
    named = str(described.base_model_name_or_path)
    if "model_id" not in config.model_fields_set:
        config = config.model_copy(update={"model_id": named, "model_revision": described.revision})
    elif config.model_id != named:
        warn(f"MODEL_ID={config.model_id} stands in for {named}, the base that the adapter names")
    return config, described


def by_type(parameters_of: torch.nn.Module, trained: bool = False) -> str:
    """Parameters by data type, such as '12,345 float32'; 4-bit ones count two to a byte."""
    counts: dict[str, int] = {}
    for parameter in parameters_of.parameters():
        if trained and not parameter.requires_grad:
            continue
        packed = parameter.dtype == torch.uint8
        name = "4-bit" if packed else str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel() * (2 if packed else 1)
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
