"""The settings in TRL's terms."""

import math
from pathlib import Path

import torch
from trl import SFTConfig

from train import model
from train.config import Config
from train.console import Refusal, has_terminal


def trainer_arguments(
    config: Config, checkpoints: Path, dtype: torch.dtype, per_device: int, accumulation: int
) -> SFTConfig:
    """What the trainer is told; every argument that is left out has TRL's default."""
    every_eval = config.eval_steps
    best = config.evaluates and config.load_best_model_at_end
    every_save = config.save_steps or (every_eval if best else None)
    arguments = SFTConfig(
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
        restore_callback_states_from_checkpoint=True,  # early stopping goes on counting after a resume
        load_best_model_at_end=best,
        metric_for_best_model="eval_loss" if config.evaluates else None,
    )
    # Several visible GPUs would make the trainer wrap the model in DataParallel, which 4-bit layers do not survive.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def schedule(config: Config, rows: int, per_device: int, accumulation: int) -> tuple[int, int, float]:
    """Optimizer steps of the run, steps of its warm-up, and the highest learning rate it reaches, as the trainer will.

    Every schedule but the constant one starts at 0 and rises evenly until the warm-up is over.

    Raises:
        Refusal: the schedule would divide by zero behind the last step.
    """
    epoch = math.ceil(math.ceil(rows / per_device) / accumulation)
    steps = config.max_steps or math.ceil(config.num_train_epochs * epoch)
    share = config.warmup_steps
    warmup = int(share) if share >= 1 else math.ceil(share * steps)
    if config.lr_scheduler_type == "constant":
        warmup = 0
    if warmup < steps:
        return steps, warmup, config.learning_rate
    if warmup == steps and config.lr_scheduler_type == "polynomial":
        raise Refusal(
            f"LR_SCHEDULER_TYPE=polynomial cannot have a warm-up as long as the run, which takes {steps} steps",
            "lower WARMUP_STEPS, or choose another schedule",
        )
    return steps, warmup, config.learning_rate * (steps - 1) / warmup
