"""Work an adapter into the base's 16-bit weights, one tensor at a time, so that no whole model is ever in memory.

The arithmetic is PEFT's own: each target layer is rebuilt alone, merged by PEFT and written out.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig
from peft.tuners.lora import Linear
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from train import model, skeleton
from train.config import Config
from train.console import Refusal, has_terminal, notes, say
from train.record import follow_umask

PREFIX = "base_model.model."
SHARD_BYTES = 2 * 2**30
BASE_FILES = ["*.json", "*.jinja", "*.model", "model*.safetensors"]
OTHERWISE = "merge with PEFT's merge_and_unload instead"


def merge(config: Config, adapter: str, out: Path) -> Config:
    """Write base plus adapter as an ordinary bf16 model folder.

    Args:
        adapter: folder with adapter_config.json; its base model is read, as a folder or from the Hub.
        out: a folder that does not exist yet.

    Returns:
        The settings with the adapter's base as MODEL_ID.

    Raises:
        Refusal: no adapter, `out` exists, or the adapter trains something a tensor-wise merge cannot place.
    """
    config, described = model.with_base_of(config, adapter)
    if out.exists():
        raise Refusal(f"{out} exists already", "give --out a folder that does not exist yet")
    if not isinstance(described, LoraConfig):
        raise Refusal(f"{adapter} is a {described.peft_type} adapter, not LoRA", OTHERWISE)
    base = _base_folder(config)
    layers = _layers(Path(adapter))
    names = _tensor_files(base)
    _refuse_transposed(config, layers)
    _refuse_unplaceable(described, layers, names)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    _write(partial, names, layers, described)
    for file in [*base.glob("*.json"), *base.glob("*.jinja"), *base.glob("*.model"), *Path(adapter).glob("*")]:
        if file.is_file() and not file.name.startswith(("adapter_", "model.safetensors")) and file.suffix != ".md":
            shutil.copyfile(file, partial / file.name)  # the adapter's tokenizer and template stand above the base's
    description = json.loads((partial / "config.json").read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    (partial / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    follow_umask(partial)
    partial.rename(out)
    say(f"{len(layers)} layers merged in bf16: {out}")
    return config


def _base_folder(config: Config) -> Path:
    architecture = model.load_model_config(config)
    if getattr(architecture, "quantization_config", None):
        raise Refusal(
            f"{config.model_id} is quantised: its weights cannot take an adapter", "set MODEL_ID to the original"
        )
    path = Path(config.model_id)
    if not path.is_dir():
        path = Path(snapshot_download(config.model_id, revision=config.model_revision, allow_patterns=BASE_FILES))
    return path


def _tensor_files(base: Path) -> dict[str, Path]:
    """Tensor name to the file that holds it; other files, such as Meta's own consolidated ones, are left out."""
    index, single = base / "model.safetensors.index.json", base / "model.safetensors"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: base / file for name, file in weight_map.items()}
    if not single.is_file():
        raise Refusal(f"{base} has no safetensors weights", "use a base model that ships them; pickles are not loaded")
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _refuse_transposed(config: Config, layers: Iterable[str]) -> None:
    """Refuse layers whose file holds the weight as [in, out]: a square one would be merged wrongly without a sign."""
    modules = dict(skeleton.build(config, model.load_model_config(config)).named_modules())
    if found := [layer for layer in layers if isinstance(modules.get(layer), Conv1D)]:
        raise Refusal(f"the base keeps the weight of {found[0]} transposed (Conv1D)", OTHERWISE)


def _refuse_unplaceable(config: LoraConfig, layers: dict[str, dict[str, torch.Tensor]], names: dict[str, Path]) -> None:
    """Refuse an adapter that is more than one rank and scale on plain linear layers of this base."""
    for option in ("rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias"):
        if getattr(config, option, None):
            raise Refusal(f"the adapter's {option} is not merged tensor by tensor", OTHERWISE)
    for layer, parts in layers.items():
        if f"{layer}.weight" not in names:
            raise Refusal(f"the base has no weight for {layer}", OTHERWISE)
        with safe_open(names[f"{layer}.weight"], framework="pt") as tensors:
            weight = tensors.get_slice(f"{layer}.weight")
            shape, kind = weight.get_shape(), weight.get_dtype()
        if shape != [parts["B"].shape[0], parts["A"].shape[1]] or kind not in ("F32", "F16", "BF16"):
            raise Refusal(f"the adapter does not fit the base's {layer}: {kind} of shape {shape}", OTHERWISE)


def _layers(adapter: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Layer name to its adapter tensors: lora_A [r, in], lora_B [out, r] and, with DoRA, a magnitude [out]."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            layer, _, part = key.removeprefix(PREFIX).partition(".lora_")
            if part.removesuffix(".weight") not in ("A", "B", "magnitude_vector"):
                raise Refusal(f"the adapter trains {key}, which is no LoRA matrix", OTHERWISE)
            layers.setdefault(layer, {})[part.removesuffix(".weight")] = tensors.get_tensor(key)
    return layers


def _merged(weight: torch.Tensor, parts: dict[str, torch.Tensor], config: LoraConfig) -> torch.Tensor:
    """A layer's weight [out, in] with its adapter worked in."""
    out_features, in_features = weight.shape
    plain = torch.nn.Linear(in_features, out_features, bias=False, dtype=weight.dtype)
    plain.weight.data = weight
    layer = Linear(plain, "default", config, r=config.r, lora_alpha=config.lora_alpha)
    layer.lora_A["default"].weight.data = parts["A"]
    layer.lora_B["default"].weight.data = parts["B"]
    if "magnitude_vector" in parts:
        layer.lora_magnitude_vector["default"].weight.data = parts["magnitude_vector"]
    layer.merge()
    return plain.weight.data


def _write(
    folder: Path, names: dict[str, Path], layers: dict[str, dict[str, torch.Tensor]], config: LoraConfig
) -> None:
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(names, layers, config), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        total += sum(tensor.nbytes for tensor in shard.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shards(
    names: dict[str, Path], layers: dict[str, dict[str, torch.Tensor]], config: LoraConfig
) -> Iterator[dict[str, torch.Tensor]]:
    """All tensors of the merged model in groups of at most SHARD_BYTES (or one tensor)."""
    shard: dict[str, torch.Tensor] = {}
    for name, file in track(names.items(), "merging", console=notes, disable=not has_terminal()):
        with safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(name)
        if tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        if (layer := name.removesuffix(".weight")) in layers:
            tensor = _merged(tensor, layers[layer], config)
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
