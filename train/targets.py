"""Which layers get an adapter: decided with PEFT's own rules on the model without weights, before anything is loaded."""

import copy
import difflib
import re
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from train.adapter import lora
from train.config import Config
from train.console import Refusal, say
from train.skeleton import in_layer, in_words, linear_layers, odd_matrices

ALL_LINEAR = "all-linear"


def check_targets(config: Config, skeleton: PreTrainedModel) -> str | list[str]:
    """TARGET_MODULES as PEFT is to get them, found fit for this architecture before any weights load.

    Args:
        skeleton: the base model on the meta device; it is left as it was.

    Raises:
        Refusal: a name that is no linear layer or that is better left alone, or layers that PEFT does not adapt.
    """
    names = config.target_modules
    if names == [ALL_LINEAR]:
        return _all_linear(config, skeleton)
    if ALL_LINEAR in names:
        raise Refusal(
            f"TARGET_MODULES={','.join(names)} names layers beside {ALL_LINEAR}",
            f"give names of layers, or {ALL_LINEAR} alone",
        )
    experts = _names_of_experts(names, skeleton)
    known = _suffixes(linear_layers(skeleton))
    if wrong := [why for name in names if name not in experts and (why := _unfit(name, skeleton, known))]:
        leaves = sorted({name.rpartition(".")[2] for name in known})
        raise Refusal(
            f"TARGET_MODULES does not fit {config.model_id}:\n  " + "\n  ".join(wrong),
            f"choose from {', '.join(leaves)}; {ALL_LINEAR} works everywhere (it leaves the output head out)",
        )
    if experts and (config.lora_dropout or config.use_dora):
        raise Refusal(
            f"TARGET_MODULES: {', '.join(experts)} are the experts here, or their router; PEFT adapts these as whole "
            "parameters, which goes with neither LORA_DROPOUT nor USE_DORA",
            "set LORA_DROPOUT=0 and USE_DORA=false, or leave these names out",
        )
    adapted = _injected(lora(config, names), skeleton)
    if experts:
        whole = ", ".join(sorted({in_layer(name) for name in adapted.targeted_parameter_names}))
        say(f"{', '.join(experts)}: PEFT adapts {whole} as whole parameters")
    for name in names:
        _say_where(name, adapted.targeted_module_names, skeleton)
    return names


def _all_linear(config: Config, skeleton: PreTrainedModel) -> str | list[str]:
    """PEFT's keyword where it means the linear layers and nothing else, else the names of those that PEFT adapts.

    For some mixtures of experts PEFT takes it for the experts and the router too, which are no linear layers and go
    with neither dropout nor DoRA; in some state-space models it names a layer that PEFT itself refuses.
    """
    linear = linear_layers(skeleton)
    routers = [name for name in linear if _is_router(name, skeleton)]
    try:
        plain = not _injected(lora(config, ALL_LINEAR), skeleton).targeted_parameter_names and not routers
    except Refusal:
        plain = False
    targets = linear
    if not plain:
        leaves = {name.rpartition(".")[2] for name in linear}
        taken = {leaf for leaf in leaves if _takes(leaf, config, skeleton)}
        targets = [name for name in linear if name.rpartition(".")[2] in taken and name not in routers]
    if not targets:
        raise Refusal(f"{config.model_id} has no linear layer that PEFT adapts", "set MODEL_ID to another model")
    refused = [name for name in linear if name not in targets and name not in routers]
    for what, names in (
        ("no linear layers (stacked experts, routers)", odd_matrices(skeleton)),
        ("routers", routers),
        ("PEFT refuses these, or takes their names for experts", refused),
    ):
        if names:
            say(f"{ALL_LINEAR}: no adapter on {', '.join(sorted({in_layer(name) for name in names}))}: {what}")
    return ALL_LINEAR if plain else targets


def _takes(leaf: str, config: Config, skeleton: PreTrainedModel) -> bool:
    """Whether PEFT adapts the linear layers of this name as such."""
    try:
        return not _injected(lora(config, [leaf]), skeleton).targeted_parameter_names
    except Refusal:
        return False


def _is_router(name: str, skeleton: PreTrainedModel) -> bool:
    """Whether a linear layer chooses the experts: it is called so, or is a gate that stands beside them."""
    parent, _, leaf = name.rpartition(".")
    return "router" in name.split(".") or (leaf == "gate" and hasattr(skeleton.get_submodule(parent), "experts"))


def _injected(adapter: LoraConfig, skeleton: PreTrainedModel) -> Any:
    """PEFT's own verdict: a copy of the skeleton with the adapter on it."""
    try:
        with torch.device("meta"):
            return get_peft_model(copy.deepcopy(skeleton), adapter)
    except ValueError as error:
        raise Refusal(
            f"TARGET_MODULES: PEFT does not adapt these layers: {error}",
            f"choose from {', '.join(sorted({n.rpartition('.')[2] for n in linear_layers(skeleton)}))}",
        ) from error


def _names_of_experts(names: list[str], skeleton: PreTrainedModel) -> list[str]:
    """Those of the names that PEFT takes for experts: transformers 5 stacks these into parameters of other names."""
    probe = LoraConfig(target_modules=list(names), task_type="CAUSAL_LM")
    try:
        convert_peft_config_for_transformers(probe, skeleton, None)
    except ValueError as error:
        raise Refusal(f"TARGET_MODULES: {error}", "give all of these names, or none of them") from error
    return [name for name in names if name not in (probe.target_modules or ())]


def _suffixes(names: list[str]) -> set[str]:
    """The names within their layers and their ends, as TARGET_MODULES may have them."""
    parts = [in_layer(name).split(".") for name in names]
    return {".".join(part[start:]) for part in parts for start in range(len(part))}


def _matches(name: str, target: str) -> bool:
    """Whether PEFT takes the module `name` for `target`."""
    return name == target or name.endswith(f".{target}")


def _unfit(target: str, skeleton: PreTrainedModel, known: set[str]) -> str | None:
    """Why a target is refused; None where all that it matches are linear layers inside the model."""
    embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    matched = [module for name, module in skeleton.named_modules() if _matches(name, target)]
    for module in matched:
        if module is embedding or module is head:
            what = "input embedding" if module is embedding else "output head"
            other = "output head" if module is embedding else "input embedding"
            tied = f"tied to the {other}: merging would lose what it learns" if _is_tied(skeleton) else "not tied"
            size = in_words(sum(own.nbytes for own in module.parameters()))
            return f"{target} is the {what}, whose whole matrix of {size} PEFT would save with the adapter ({tied})"
        if not isinstance(module, torch.nn.Linear | Conv1D):
            return f"{target} is a {type(module).__name__}, no linear layer"
    near = difflib.get_close_matches(target, sorted(known), n=1)
    return None if matched else f"no layer is called {target}" + (f"; did you mean {near[0]}?" if near else "")


def _is_tied(skeleton: PreTrainedModel) -> bool:
    head: Any = skeleton.get_output_embeddings()
    embedding: Any = skeleton.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def _say_where(target: str, adapted: list[str], skeleton: PreTrainedModel) -> None:
    """A line about a target that only some of the layers have, as in models that mix two kinds of layer."""
    numbered = [found for name in adapted if _matches(name, target) and (found := re.match(r"(.*?)\.(\d+)\.", name))]
    for stack in sorted({found[1] for found in numbered}):
        have = {found[2] for found in numbered if found[1] == stack}
        layers = sum(1 for _ in skeleton.get_submodule(stack).children())
        if len(have) < layers:
            say(f"{target}: only {len(have)} of the {layers} layers have it")
