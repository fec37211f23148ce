"""What merging costs: the loss of base plus adapter, as it was trained, and of the merged model, on the same rows."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from train import model, record, rows, templates, tokens
from train.account import Account
from train.config import Config
from train.console import Refusal, progress, say, warn
from train.settings_text import SETTINGS

MOST_ROWS = 32


def report(config: Config, adapter: Path, merged: Path) -> None:
    """Say both losses, on up to 32 rows of DATASET, or else of what the adapter was trained on as run.json says.

    The merged model is in its place already: where the comparison cannot be made, a line says why.

    Args:
        config: with the adapter's base as MODEL_ID.
    """
    if not torch.cuda.is_available() and not config.allow_cpu:
        say("losses before and after are not compared: there is no GPU (ALLOW_CPU=true compares on the CPU, slowly)")
        return
    run = record.read(adapter.parent)
    if run and "dataset" not in config.model_fields_set:
        config = _as_trained(config, run["settings"])
    elif "dataset" not in config.model_fields_set:
        say("losses before and after are not compared: set DATASET to the rows to compare on")
        return
    try:
        dtype, _ = model.compute_dtype(config)
        labelled = _rows(config, adapter)
        quantised: Any = model.load_base(config, dtype)
        before = _loss(PeftModel.from_pretrained(quantised, str(adapter)), labelled, "base and adapter")
        del quantised
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=dtype, device_map={"": model.device()})
        after = _loss(whole, labelled, "merged")
    except (Refusal, torch.OutOfMemoryError) as trouble:
        warn(f"losses before and after are not compared: {str(trouble).splitlines()[0]}")
        return
    kind = "4 bits" if config.load_in_4bit else str(dtype).removeprefix("torch.")
    say(f"loss on {len(labelled)} rows: {before:.4f} with the adapter on its base in {kind}, {after:.4f} merged")


def _as_trained(config: Config, settings: dict[str, Any]) -> Config:
    """The run's own settings of rows and quantisation, where no others are given."""
    then = {
        name.lower(): settings[name]
        for name, field in SETTINGS.items()
        if name in settings and field.json_schema_extra["group"] in ("Data", "Quantisation")  # type: ignore
    }
    return config.model_copy(update={name: then[name] for name in then if name not in config.model_fields_set})


def _rows(config: Config, adapter: Path) -> list[dict[str, Any]]:
    tokenizer = model.load_tokenizer(config, str(adapter))  # it carries the template of the training
    template, _, _ = templates.of_model(config, tokenizer, model.load_model_config(config))
    account = Account("compared")
    usable = rows.shaped(rows.named(config)["train"], config, account)
    tokenised = tokens.tokenise(usable, template, config.max_length, config.completion_only_loss, False, account)
    found = list(islice(tokenised, MOST_ROWS))
    if not found:
        raise Refusal("no row can be used", "set DATASET to rows to compare on")
    return found


@torch.no_grad()
def _loss(whole: Any, labelled: list[dict[str, Any]], doing: str) -> float:
    """Mean loss a learned token, of rows one at a time."""
    whole.eval()
    total = count = 0.0
    for row in progress(labelled, f"loss, {doing}", len(labelled)):
        ids, labels = (torch.tensor([row[key]], device=whole.device) for key in ("input_ids", "labels"))
        learned = int((labels[:, 1:] != tokens.IGNORED).sum())
        if learned:
            total += float(whole(input_ids=ids, labels=labels, use_cache=False).loss) * learned
            count += learned
    return total / count
