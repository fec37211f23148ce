"""Every setting with its type, default, unit and help text.

Names are the upper-cased field names of TrainingArguments, SFTConfig, LoraConfig and BitsAndBytesConfig where one of
those has the setting. `environment.py` reads them; README's table and `env.example` are generated from this class.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "lion_8bit",
    "paged_lion_8bit",
    "ademamix_8bit",
    "paged_ademamix_8bit",
    "adafactor",
    "sgd",
]
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "constant",
    "constant_with_warmup",
]
Tracker = Literal["none", "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "clearml"]

DEFAULT_DATASET = "databricks/databricks-dolly-15k"
# Tokens of one forward pass that the automatic micro-batch stays under.
MICRO_BATCH_TOKENS = 2048


def setting(group: str, default: Any, text: str, **limits: Any) -> Any:
    """A field of `Config` under a heading of the settings table."""
    return Field(default, description=text, json_schema_extra={"group": group}, **limits)


class Config(BaseSettings):
    """The settings of one run, checked. Defaults are the course's QLoRA recipe."""

    model_config = SettingsConfigDict(
        alias_generator=str.upper,
        case_sensitive=True,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    model_id: str = setting("Model", "meta-llama/Llama-3.1-8B", "Base model: a Hub name or a local folder.")
    model_revision: str | None = setting("Model", None, "Branch, tag or commit of the base model.")
    trust_remote_code: bool = setting("Model", False, "Run Python code that the model's repository ships.")
    hf_token: SecretStr | None = setting("Model", None, "Hugging Face token, for gated models. Also HF_TOKEN_FILE.")

    dataset: str = setting(
        "Data", DEFAULT_DATASET, "Rows to train on: a Hub name, or a local JSON, JSONL, CSV or Parquet file or folder."
    )
    dataset_config: str | None = setting("Data", None, "Configuration of a dataset that has several.")
    dataset_revision: str | None = setting("Data", None, "Branch, tag or commit of the dataset.")
    dataset_split: str | None = setting(
        "Data", None, "Split and slice, such as train[:1000]. Unset: train[:1000] of the default dataset, else train."
    )
    eval_dataset: str | None = setting("Data", None, "Rows to evaluate on, in the same forms as DATASET.")
    eval_dataset_split: str | None = setting("Data", None, "Split of EVAL_DATASET. Unset: validation, test or train.")
    eval_fraction: float = setting("Data", 0.0, "Share of the rows held out for evaluation.", ge=0, lt=1)
    max_length: int = setting("Data", 512, "Longest row in tokens; the rest of a longer row is cut.", ge=8)
    completion_only_loss: bool = setting("Data", True, "Learn the answers only; false learns every token.")

    load_in_4bit: bool = setting("Quantisation", True, "Hold the base model's linear layers in 4 bits.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = setting("Quantisation", "nf4", "4-bit number format.")
    bnb_4bit_use_double_quant: bool = setting("Quantisation", True, "Quantise the quantisation scales too.")
    bnb_4bit_compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "Quantisation",
        "auto",
        "Type of the arithmetic and of the weights left unquantised. auto: bfloat16 where the hardware has it, "
        "else float16 on a GPU and float32 on a CPU.",
    )

    lora_r: int = setting("LoRA", 16, "Rank of the adapter matrices.", ge=1)
    lora_alpha: int = setting("LoRA", 32, "Scale of the adapter, divided by the rank.", ge=1)
    lora_dropout: float = setting("LoRA", 0.05, "Dropout on the adapter's input.", ge=0, lt=1)
    target_modules: Annotated[list[str], NoDecode] = setting(
        "LoRA", ["q_proj", "k_proj", "v_proj", "o_proj"], "Layers that get an adapter, or all-linear."
    )
    use_rslora: bool = setting("LoRA", False, "Divide the scale by the square root of the rank (rsLoRA).")
    use_dora: bool = setting("LoRA", False, "Learn the weights' magnitude separately (DoRA); slower.")

    effective_batch_size: int = setting("Training", 16, "Examples of one optimizer step, whatever the machine.", ge=1)
    per_device_train_batch_size: int | None = setting(
        "Training",
        None,
        f"Examples of one forward pass. Unset: as many as stay under {MICRO_BATCH_TOKENS} tokens.",
        ge=1,
    )
    gradient_accumulation_steps: int | None = setting(
        "Training",
        None,
        "Forward passes of one optimizer step. Unset: EFFECTIVE_BATCH_SIZE over the micro-batch.",
        ge=1,
    )
    num_train_epochs: float = setting("Training", 1.0, "Passes over the rows.", gt=0)
    max_steps: int | None = setting("Training", None, "Optimizer steps; stands in place of NUM_TRAIN_EPOCHS.", ge=1)
    learning_rate: float = setting("Training", 2e-4, "Peak learning rate.", gt=0)
    lr_scheduler_type: Scheduler = setting("Training", "linear", "Learning-rate schedule, by its name in transformers.")
    warmup_steps: float = setting("Training", 0.0, "Warm-up steps; below 1, a share of all steps.", ge=0)
    weight_decay: float = setting("Training", 0.0, "Weight decay of the optimizer.", ge=0)
    max_grad_norm: float = setting("Training", 1.0, "Gradient norm to clip at; 0 does not clip.", ge=0)
    optim: Optimizer = setting("Training", "paged_adamw_8bit", "Optimizer, by its name in transformers.")
    neftune_noise_alpha: float | None = setting("Training", None, "Noise on the input embeddings (NEFTune).", gt=0)
    activation_checkpointing: bool = setting("Training", True, "Recompute activations to save memory.")
    seed: int = setting("Training", 42, "Seed of every random choice.", ge=0, lt=2**32)

    logging_steps: int = setting("Progress", 10, "Optimizer steps between two log lines.", ge=1)
    eval_steps: int | None = setting("Progress", None, "Optimizer steps between evaluations. Unset: each epoch.", ge=1)
    save_steps: int | None = setting("Progress", None, "Optimizer steps between checkpoints. Unset: each epoch.", ge=1)
    save_total_limit: int = setting("Progress", 2, "Checkpoints to keep.", ge=1)
    load_best_model_at_end: bool = setting(
        "Progress", True, "Keep the adapter with the lowest evaluation loss, when there is evaluation."
    )
    early_stopping_patience: int | None = setting(
        "Progress", None, "Stop after this many evaluations without a lower loss.", ge=1
    )
    report_to: Annotated[list[Tracker], NoDecode] = setting(
        "Progress", ["none"], "Trackers, by their names in transformers: tensorboard, wandb …"
    )
    wandb_api_key: SecretStr | None = setting("Progress", None, "Key for REPORT_TO=wandb. Also WANDB_API_KEY_FILE.")

    output_dir: str = setting("Output and machine", "outputs", "Folder for the adapter, checkpoints and records.")
    allow_cpu: bool = setting("Output and machine", False, "Train without a GPU (slow).")
    log_level: Literal["info", "debug"] = setting("Output and machine", "info", "debug adds tracebacks.")

    @model_validator(mode="before")
    @classmethod
    def leave_out_blanks(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if not isinstance(value, str) or value.strip()}

    @field_validator("target_modules", "report_to", mode="before")
    @classmethod
    def split_at_commas(cls, value: Any) -> Any:
        return [name for part in value.split(",") if (name := part.strip())] if isinstance(value, str) else value

    @field_validator("num_train_epochs", "max_steps", mode="before")
    @classmethod
    def some_training(cls, value: Any) -> Any:
        if re.fullmatch(r"0+(\.0*)?", str(value).strip()):
            raise ValueError("nothing to train")
        return value

    @field_validator("model_id", "dataset", "eval_dataset", "output_dir")
    @classmethod
    def expand_home(cls, value: str | None) -> str | None:
        return str(Path(value).expanduser()) if value and re.match("~(/|$)", value) else value

    @field_validator("hf_token", "wandb_api_key")
    @classmethod
    def one_word(cls, value: SecretStr | None) -> SecretStr | None:
        if value and re.search(r"\s", value.get_secret_value()):
            raise ValueError("has blanks inside; a comment after it is not allowed")
        return value

    @model_validator(mode="after")
    def contradictions(self) -> "Config":
        given = self.model_fields_set
        per_device, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        found = []
        if self.eval_dataset and self.eval_fraction:
            found.append("EVAL_DATASET and EVAL_FRACTION both name evaluation rows: give one of them")
        if self.early_stopping_patience and not self.evaluates:
            found.append("EARLY_STOPPING_PATIENCE needs evaluation rows: set EVAL_FRACTION or EVAL_DATASET")
        if self.eval_steps and not self.evaluates:
            found.append("EVAL_STEPS needs evaluation rows: set EVAL_FRACTION or EVAL_DATASET")
        keeps_best = self.evaluates and self.load_best_model_at_end
        if keeps_best and self.save_steps and (not self.eval_steps or self.save_steps % self.eval_steps):
            found.append(
                "SAVE_STEPS must be a multiple of EVAL_STEPS to keep the best checkpoint: "
                "leave SAVE_STEPS out, or set LOAD_BEST_MODEL_AT_END=false"
            )
        if self.max_steps and "num_train_epochs" in given:
            found.append("MAX_STEPS and NUM_TRAIN_EPOCHS both say when to stop: give one of them")
        if per_device and accumulation:
            product = per_device * accumulation
            if "effective_batch_size" in given and product != self.effective_batch_size:
                found.append(
                    f"PER_DEVICE_TRAIN_BATCH_SIZE × GRADIENT_ACCUMULATION_STEPS is {product}, "
                    f"EFFECTIVE_BATCH_SIZE is {self.effective_batch_size}: leave one of the three out"
                )
        elif self.effective_batch_size % (per_device or accumulation or 1):
            name = "PER_DEVICE_TRAIN_BATCH_SIZE" if per_device else "GRADIENT_ACCUMULATION_STEPS"
            found.append(
                f"{name}={per_device or accumulation} does not divide EFFECTIVE_BATCH_SIZE={self.effective_batch_size}"
            )
        if found:
            raise ValueError("\n".join(found))
        return self

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation rows."""
        return bool(self.eval_dataset) or self.eval_fraction > 0

    @property
    def split(self) -> str:
        """Split of DATASET that is read; only the default dataset is cut to the course's 1,000 rows."""
        return self.dataset_split or ("train[:1000]" if self.dataset == DEFAULT_DATASET else "train")

    def micro_batch(self) -> tuple[int, int, str]:
        """Examples of one forward pass, forward passes of one optimizer step, and why."""
        per_device, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        if per_device and accumulation:
            return per_device, accumulation, "both given"
        if per_device:
            return per_device, self.effective_batch_size // per_device, "PER_DEVICE_TRAIN_BATCH_SIZE given"
        if accumulation:
            return self.effective_batch_size // accumulation, accumulation, "GRADIENT_ACCUMULATION_STEPS given"
        fits = max(1, MICRO_BATCH_TOKENS // self.max_length)
        size = max(n for n in range(1, fits + 1) if self.effective_batch_size % n == 0)
        tokens = f"at most {size * self.max_length:,} tokens a forward pass"
        return size, self.effective_batch_size // size, f"auto: {tokens}"
