"""The run, top to bottom: QLoRA fine-tuning as one reads it in a tutorial, every derived number said with its reason."""

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback
from trl import SFTTrainer

from train import adapter, arguments, checkpoint, doctor, model, record, rows, skeleton, sources, targets, templates
from train.config import Config
from train.console import say, warn
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
    os.environ.setdefault("WANDB_DIR", str(output))  # else its files go with the container
    data_sha256 = {
        "DATASET": sources.fingerprint(config.dataset),
        "EVAL_DATASET": sources.fingerprint(config.eval_dataset),
    }
    earlier = checkpoint.find(output, checkpoints, settings, data_sha256)
    if earlier.finished:
        return

    # 2. Rows to tokens: the answers are learned, the questions are only read.
    surveyed = rows.survey(config)  # all of them, before anything of the model is downloaded
    architecture = model.load_model_config(config)
    bare = skeleton.build(config, architecture)
    say(f"base: {skeleton.weight(config, bare, dtype)}")
    layers = targets.check_targets(config, bare)
    tokenizer = model.load_tokenizer(config)
    template, generation, why = templates.of_model(config, tokenizer, architecture)
    say(why)
    train_rows, eval_rows = rows.load(config, template, surveyed)

    # 3. The base in 4 bits, frozen; LoRA matrices beside its linear layers, trained.
    per_device, accumulation, why = config.micro_batch()
    batch = accumulation * per_device
    say(f"effective batch: {accumulation} × {per_device} = {batch} examples an optimizer step ({why})")
    if batch > len(train_rows.rows):
        warn(f"the effective batch of {batch} exceeds the {len(train_rows.rows)} rows: one step an epoch")
    steps, warmup, peak = arguments.schedule(config, len(train_rows.rows), per_device, accumulation)
    say(f"plan: {steps:,} optimizer steps, warm-up {warmup:,}, peak learning rate {peak:.3g}")
    if peak < config.learning_rate:
        warn(
            f"WARMUP_STEPS={config.warmup_steps:g} is not over when the run ends, after {steps:,} steps: the learning "
            f"rate gets no higher than {peak:.3g} of {config.learning_rate:g}"
        )
    base = model.load_base(config, dtype)
    if config.optim.startswith("paged") and base.device.type == "cpu":
        say(f"{config.optim}: on a CPU its state is not paged")
    say(f"base parameters by type: {model.by_type(base)}")
    computed = f"in {str(dtype).removeprefix('torch.')} with {base.config._attn_implementation} attention"
    proof_row = train_rows.rows[0]["input_ids"]
    untouched = adapter.logits(base, proof_row)  # what the saved adapter is proven on

    # 4. TRL's trainer does the loop.
    trainer = SFTTrainer(
        model=base,
        args=arguments.trainer_arguments(config, checkpoints, dtype, per_device, accumulation),
        train_dataset=train_rows.rows,
        eval_dataset=eval_rows.rows if eval_rows else None,
        processing_class=tokenizer,
        peft_config=adapter.lora(config, layers),
    )
    adapted: Any = trainer.model
    adapter.adapter_in_float32(adapted)  # TRL casts the adapter of a quantised base to bf16
    say(f"adapter ({model.by_type(adapted, trained=True)}): {adapter.summary(adapted)}")
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if config.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(config.early_stopping_patience))

    run: dict[str, Any] = {
        "status": "running",
        "settings": settings,
        "versions": record.versions(),
        "hardware": record.hardware(),
        "model_revision": record.commit_of(config.model_id, config.model_revision),
        "data_sha256": data_sha256,
        "dataset_split": [source.split for source in sources.to_train(config)],
        "compute_dtype": str(dtype).removeprefix("torch."),
        "examples_a_step": batch,
        "examples_a_forward_pass": per_device,
        "forward_passes_a_step": accumulation,
        "train_rows": train_rows.account.as_record(),
        "eval_rows": eval_rows.account.as_record() if eval_rows else None,
        "seconds_to_first_step": round(time.time() - started, 1),
    }
    record.write(output, run)
    with record.RunLog(output, earlier.step, computed) as log, checkpoint.StopOnSignal() as stop:
        trainer.add_callback(log)
        trainer.add_callback(stop)
        trainer.add_callback(record.SaveOnlyNumbers(computed))
        result = trainer.train(resume_from_checkpoint=earlier.checkpoint)
    step = trainer.state.global_step
    if stop.ends(trainer.state):
        raise checkpoint.stopped(f"by {stop.received} behind step {step} of {trainer.state.max_steps}, which is saved")

    # 5. The adapter, whole and proven, or not at all.
    if not math.isfinite(result.training_loss) or not adapter.trained_is_finite(adapted):
        raise record.diverged(f"the loss or the adapter became no number by step {step}", computed)
    partial, final = output / "adapter.partial", output / "adapter"
    shutil.rmtree(partial, ignore_errors=True)
    adapter.save(adapted, tokenizer, generation, partial)
    difference = adapter.prove(adapted, partial, proof_row, untouched)
    say(f"the adapter read back on the untouched base: logits differ from the trained model's by {difference:.2g}")
    record.follow_umask(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    losses = [entry["loss"] for entry in log.entries if "loss" in entry]
    run |= {
        "status": "finished",
        "steps": step,
        "best_checkpoint_step": trainer.state.best_global_step,
        "best_eval_loss": trainer.state.best_metric,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "log": log.entries,
        "train_seconds": round(result.metrics["train_runtime"], 1),
        "seconds": round(time.time() - started, 1),
        "peak_gpu_bytes_allocated": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "peak_gpu_bytes_reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
        "adapter_sha256": record.sha256(final / "adapter_model.safetensors"),
        "adapter_reload_difference": difference,
    }
    record.write(output, run)
    say(f"done in {run['seconds']:.0f} s: {final}")
