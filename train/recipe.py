"""The run, top to bottom: QLoRA fine-tuning as one reads it in a tutorial, every derived number said with its reason."""

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from train import data, doctor, model, record, tokens
from train.config import Config
from train.console import Refusal, has_terminal, say, warn
from train.settings_text import resolved


def train(config: Config) -> None:
    """Fine-tune, and leave `adapter/`, `run.json` and `log.jsonl` in the output folder.

    Raises:
        Refusal: settings, data or machine will not do; or the loss became no number.
    """
    started = time.time()
    output, settings = Path(config.output_dir), resolved(config)
    checkpoints = output / "checkpoints"

    # 1. What can be known before anything expensive.
    say(f"machine: {doctor.machine(config)}")
    dtype, why = model.compute_dtype(config)
    say(f"compute in {dtype}: {why}")
    doctor.output(config)
    doctor.trackers(config)
    resume = find_resume(output, checkpoints, settings)
    if resume == "finished":
        return

    # 2. Rows to tokens: the answers are learned, the questions are only read.
    architecture = model.load_model_config(config)
    model.check_targets(config, architecture)
    tokenizer = model.load_tokenizer(config)
    if tokens.set_default_template(tokenizer):
        say("the model has no chat template: the plain '### Instruction / ### Response' one is used and saved with it")
    generation = model.generation_config(config, tokenizer)
    train_rows, eval_rows = load_rows(config, tokenizer, generation.eos_token_id)

    # 3. The base in 4 bits, frozen; LoRA matrices beside its linear layers, trained.
    per_device, accumulation, why = config.micro_batch()
    say(f"an optimizer step: {accumulation} × {per_device} = {accumulation * per_device} examples ({why})")
    if accumulation * per_device > len(train_rows.rows):
        warn(
            f"the effective batch of {accumulation * per_device} exceeds the {len(train_rows.rows)} rows: one step an epoch"
        )
    base = model.load_base(config, dtype)
    if config.optim.startswith("paged") and base.device.type == "cpu":
        say(f"{config.optim}: on a CPU its state is not paged")
    say(f"base parameters by type: {by_type(base)}")

    # 4. TRL's trainer does the loop.
    trainer = SFTTrainer(
        model=base,
        args=trainer_arguments(config, checkpoints, dtype, per_device, accumulation),
        train_dataset=train_rows.rows,
        eval_dataset=eval_rows.rows if eval_rows else None,
        processing_class=tokenizer,
        peft_config=model.lora(config),
    )
    adapted: Any = trainer.model
    model.adapter_in_float32(adapted)  # TRL casts the adapter of a quantised base to bf16
    say(f"trained: {by_type(adapted, trained=True)} of {adapted.num_parameters():,} parameters")
    log = record.RunLog(output, resumed=resume is not None)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(log)
    if config.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(config.early_stopping_patience))

    run: dict[str, Any] = {
        "status": "running",
        "settings": settings,
        "versions": record.versions(),
        "hardware": record.hardware(),
        "model_revision": getattr(architecture, "_commit_hash", None),
        "dataset_sha256": data.fingerprint(config.dataset),
        "compute_dtype": str(dtype).removeprefix("torch."),
        "examples_a_forward_pass": per_device,
        "forward_passes_a_step": accumulation,
        "train_rows": train_rows.account(),
        "eval_rows": eval_rows.account() if eval_rows else None,
        "seconds_to_first_step": round(time.time() - started, 1),
    }
    record.write(output, run)
    result = trainer.train(resume_from_checkpoint=resume)

    # 5. The adapter, whole or not at all.
    adapter = save_adapter(adapted, tokenizer, generation, output)
    losses = [entry["loss"] for entry in log.entries if "loss" in entry]
    run |= {
        "status": "finished",
        "steps": trainer.state.global_step,
        "best_checkpoint_step": trainer.state.best_global_step,
        "best_eval_loss": trainer.state.best_metric,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "log": log.entries,
        "train_seconds": round(result.metrics["train_runtime"], 1),
        "seconds": round(time.time() - started, 1),
        "peak_gpu_bytes_allocated": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "peak_gpu_bytes_reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
        "adapter_sha256": record.sha256(adapter / "adapter_model.safetensors"),
    }
    record.write(output, run)
    say(f"done in {run['seconds']:.0f} s: {adapter}")


def find_resume(output: Path, checkpoints: Path, settings: dict[str, Any]) -> str | None:
    """The checkpoint to go on from, "finished" where nothing is left to do, None for a fresh start."""
    earlier = record.read(output)
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    if earlier is None and last is not None:
        raise Refusal(f"{checkpoints} holds checkpoints of an unknown run", "set OUTPUT_DIR to another folder")
    finished = earlier is not None and earlier["status"] == "finished"
    if earlier is None or not (finished or last):
        return None
    record.refuse_other_settings(earlier, settings)
    if finished and (output / "adapter").is_dir():
        say(f"{output / 'adapter'} is finished with these settings: nothing to do")
        return "finished"
    say(f"going on from {last}")
    return last


def load_rows(config: Config, tokenizer: Any, stop_ids: list[int]) -> tuple[tokens.Tokenised, tokens.Tokenised | None]:
    """Rows to train on and, where asked for, to evaluate on."""
    raw = data.load(config.dataset, config.split, config.dataset_config, config.dataset_revision)
    eval_raw = data.load_eval(config.eval_dataset, config.eval_dataset_split) if config.eval_dataset else None
    if config.eval_fraction:
        if len(raw) * (1 - config.eval_fraction) < 1:
            raise Refusal(
                f"EVAL_FRACTION={config.eval_fraction} of {len(raw)} rows leaves none to train on", "lower it"
            )
        halves = raw.train_test_split(test_size=config.eval_fraction, seed=config.seed)
        raw, eval_raw = halves["train"], halves["test"]

    def tokenised(rows: Any, name: str) -> tokens.Tokenised:
        shape, to_shape = data.shaper(rows.column_names)
        say(f"{name} rows: {len(rows):,} read, seen as {shape}")
        return tokens.tokenise(
            rows, to_shape, tokenizer, stop_ids, config.max_length, config.completion_only_loss, name
        )

    return tokenised(raw, "train"), tokenised(eval_raw, "eval") if eval_raw else None


def trainer_arguments(
    config: Config, checkpoints: Path, dtype: torch.dtype, per_device: int, accumulation: int
) -> SFTConfig:
    """The settings in TRL's terms."""
    every_eval = config.eval_steps
    best = config.evaluates and config.load_best_model_at_end
    every_save = config.save_steps or (every_eval if best else None)
    return SFTConfig(
        output_dir=str(checkpoints),
        per_device_train_batch_size=per_device,
        per_device_eval_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=config.num_train_epochs,
        max_steps=config.max_steps or -1,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        optim=config.optim,
        neftune_noise_alpha=config.neftune_noise_alpha,
        activation_checkpointing=config.activation_checkpointing,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu=model.device().type == "cpu",
        max_length=None,  # the rows are cut already
        seed=config.seed,
        logging_steps=config.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # else a loss that is no number is logged as 0
        report_to=list(config.report_to),
        disable_tqdm=not has_terminal(),
        eval_strategy=("steps" if every_eval else "epoch") if config.evaluates else "no",
        eval_steps=every_eval,
        prediction_loss_only=True,  # the logits of all rows would fill the memory
        save_strategy="steps" if every_save else "epoch",
        save_steps=every_save or 500,
        save_total_limit=config.save_total_limit,
        load_best_model_at_end=best,
        metric_for_best_model="eval_loss" if config.evaluates else None,
    )


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


def save_adapter(adapted: Any, tokenizer: Any, generation: Any, output: Path) -> Path:
    """Adapter, tokenizer with template, and generation settings in `adapter/`, written beside it and renamed."""
    partial, adapter = output / "adapter.partial", output / "adapter"
    shutil.rmtree(partial, ignore_errors=True)
    for lora in adapted.peft_config.values():
        lora.target_modules = sorted(lora.target_modules)  # PEFT keeps a set, in another order each run
    adapted.save_pretrained(str(partial))
    tokenizer.save_pretrained(str(partial))
    generation.save_pretrained(str(partial))
    record.follow_umask(partial)
    shutil.rmtree(adapter, ignore_errors=True)
    partial.rename(adapter)
    return adapter
