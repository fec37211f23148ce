"""The base without weights, on the meta device: its layers, and what it will weigh."""

import re

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from train import model
from train.config import Config
from train.console import Exit, Refusal, warn

# Share of the parameters outside linear layers and embeddings that makes 4 bits a disappointment.
LARGE_SHARE = 0.05


def build(config: Config, architecture: PretrainedConfig) -> PreTrainedModel:
    """The base model on the meta device: every module and shape, no weights.

    Raises:
        Refusal: the architecture is no causal language model.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.trust_remote_code)
    except ValueError as error:
        raise Refusal(
            f"{config.model_id} ({architecture.model_type}) is no causal language model: {str(error).splitlines()[0]}",
            "set MODEL_ID to a model that generates text",
        ) from error


def odd_matrices(skeleton: PreTrainedModel) -> list[str]:
    """Full names of the matrices that no linear layer, embedding or convolution holds, such as stacked experts."""
    holders = (torch.nn.Linear, Conv1D, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
    return [
        f"{name}.{own}"
        for name, module in skeleton.named_modules()
        if not isinstance(module, holders)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    ]


def linear_layers(skeleton: PreTrainedModel) -> list[str]:
    """Full names of the layers that may get an adapter: all linear ones but the output head."""
    head = skeleton.get_output_embeddings()
    return [name for name, m in skeleton.named_modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]


def in_layer(name: str) -> str:
    """A module's name within its layer: self_attn.q_proj for model.layers.3.self_attn.q_proj."""
    return re.sub(r"^(.*?\.)?\d+\.", "", name)


def weight(config: Config, skeleton: PreTrainedModel, dtype: torch.dtype) -> str:
    """What the base will weigh on the device, in words; a warning where much of it is no linear layer.

    bitsandbytes quantises linear layers alone: stacked experts stay in `dtype`.

    Args:
        skeleton: the base model on the meta device.

    Raises:
        Refusal: it is more than the whole GPU holds.
    """
    skip = HfQuantizer.get_modules_to_not_convert(skeleton, None, list(skeleton._keep_in_fp32_modules or []))
    four_bit = sum(
        module.weight.numel()
        for name, module in skeleton.named_modules()
        if config.load_in_4bit
        and (isinstance(module, Conv1D) or type(module) is torch.nn.Linear)
        and should_convert_module(name, skip)
    )
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    kind, rest = str(dtype).removeprefix("torch."), (total - four_bit) * dtype.itemsize
    share = f"{100 * four_bit / total:.1f} % of the {total:,} parameters"
    needs = f"{in_words(four_bit // 2 + rest)} for weights, {in_words(rest)} of it in {kind}"
    odd = odd_matrices(skeleton)
    left = sum(skeleton.get_parameter(name).numel() for name in odd)
    if config.load_in_4bit and left > LARGE_SHARE * total:
        names = ", ".join(sorted({in_layer(name) for name in odd}))
        warn(
            f"only {share} are 4-bit; {in_words(rest)} stay in {kind}, {in_words(left * dtype.itemsize)} of it in "
            f"{names}: bitsandbytes quantises linear layers alone"
        )
    held = gpu_bytes()
    if held is not None and four_bit // 2 + rest > held:
        raise Refusal(
            f"{config.model_id} takes {needs}; the GPU has {in_words(held)} in all",
            "take a larger GPU or a smaller model" + ("" if config.load_in_4bit else ", or set LOAD_IN_4BIT=true"),
            Exit.MACHINE,
        )
    return f"{share} in 4 bits: {needs}" if config.load_in_4bit else needs


def gpu_bytes() -> int | None:
    """Memory of the run's GPU, in bytes; None on a CPU."""
    return torch.cuda.get_device_properties(0).total_memory if model.device().type == "cuda" else None


def in_words(size: int) -> str:
    """A number of bytes in the largest fitting binary unit."""
    power = min(3, (max(size, 1).bit_length() - 1) // 10)
    return f"{size / 1024**power:,.1f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
