"""Every setting with its type, default, unit and help text.

Names are the upper-cased field names of TrainingArguments, SFTConfig, LoraConfig and BitsAndBytesConfig where one of
those has the setting. `environment.py` reads them; README's table and `env.example` are generated from this class.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from train import contradictions, values
from train.values import Length, Names, Optimizer, Place, Places, Prose, Scheduler, Secret, Trackers, Weights

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

    model_id: Place = setting("Model", "meta-llama/Llama-3.1-8B", "Base model: a Hub name or a local folder.")
    model_revision: str | None = setting("Model", None, "Branch, tag or commit of the base model.")
    trust_remote_code: bool = setting("Model", False, "Run Python code that the model's repository ships.")
    hf_token: Secret | None = setting("Model", None, "Hugging Face token, for gated models. Also HF_TOKEN_FILE.")

    dataset: Places = setting(
        "Data",
        [DEFAULT_DATASET],
        "Rows to train on: a Hub name, or a local JSON, JSONL, CSV or Parquet file or folder. Several, with commas.",
        min_length=1,
    )
    dataset_config: Names = setting("Data", [], "Configuration of a dataset that has several. One, or one each.")
    dataset_revision: Names = setting("Data", [], "Branch, tag or commit of the dataset. One, or one each.")
    dataset_split: Names = setting(
        "Data",
        [],
        "Split and slice, such as train[:1000]. One, or one each. "
        "Unset: train[:1000] of the default dataset, else train.",
    )
    dataset_weights: Weights = setting(
        "Data", [], "How often each dataset's rows are seen in an epoch: 2 is twice, 0.5 every other row."
    )
    max_rows: int | None = setting("Data", None, "Rows to read of each dataset, from its start.", ge=1)
    streaming: bool = setting(
        "Data", False, "Read Hub datasets over the network as far as MAX_ROWS, without storing them."
    )
    deduplicate: bool = setting("Data", False, "Leave out rows that are equal to an earlier one.")
    eval_dataset: Places = setting("Data", [], "Rows to evaluate on, in the same forms as DATASET.")
    eval_dataset_config: Names = setting("Data", [], "Configuration of EVAL_DATASET. One, or one each.")
    eval_dataset_revision: Names = setting("Data", [], "Branch, tag or commit of EVAL_DATASET. One, or one each.")
    eval_dataset_split: Names = setting(
        "Data", [], "Split of EVAL_DATASET. One, or one each. Unset: validation, test or train."
    )
    eval_fraction: float = setting("Data", 0.0, "Share of the rows held out for evaluation.", ge=0, lt=1)
    prompt_column: str | None = setting("Data", None, "Column of the question, where no rule knows it.")
    completion_column: str | None = setting(
        "Data", None, "Column of the answer, where no rule knows it; alone, of plain text."
    )
    prompt_template: Prose | None = setting(
        "Data", None, "Question made of columns: Translate to {language}:\\n{source}. {{ is a brace."
    )
    system_prompt: Prose | None = setting("Data", None, "System turn of every chat that has none.")
    max_length: int = setting("Data", 512, "Longest row in tokens; the rest of a longer row is cut.", ge=8)
    long_rows: Literal["cut", "drop"] = setting("Data", "cut", "What happens to rows above MAX_LENGTH.")
    max_dropped_fraction: float = setting(
        "Data",
        0.05,
        "Share of the rows that may be unusable before the run is refused; unless it is set, ten always may.",
        ge=0,
        le=1,
    )
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
    target_modules: Names = setting(
        "LoRA", ["q_proj", "k_proj", "v_proj", "o_proj"], "Layers that get an adapter, or all-linear.", min_length=1
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
    num_train_epochs: Annotated[float, Length] = setting("Training", 1.0, "Passes over the rows.", gt=0)
    max_steps: Annotated[int | None, Length] = setting(
        "Training", None, "Optimizer steps; stands in place of NUM_TRAIN_EPOCHS.", ge=1
    )
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
    report_to: Trackers = setting(
        "Progress", ["none"], "Trackers, by their names in transformers: tensorboard, wandb …", min_length=1
    )
    wandb_api_key: Secret | None = setting("Progress", None, "Key for REPORT_TO=wandb. Also WANDB_API_KEY_FILE.")

    output_dir: Place = setting("Output and machine", "outputs", "Folder for the adapter, checkpoints and records.")
    allow_cpu: bool = setting("Output and machine", False, "Train without a GPU (slow).")
    log_level: Literal["info", "debug"] = setting("Output and machine", "info", "debug adds tracebacks.")

    @model_validator(mode="before")
    @classmethod
    def leave_out_blanks(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if not isinstance(value, str) or value.strip()}

    @field_validator("*", mode="before")
    @classmethod
    def printable(cls, value: Any) -> Any:  # called before the field's own validators
        return values.printable(value)

    @model_validator(mode="after")
    def contradict_nothing(self) -> "Config":
        if found := contradictions.of(self):
            raise ValueError("\n".join(found))
        return self

    def each(self, values: list[str], of: str) -> list[str | None]:
        """A setting's value for each dataset of DATASET or EVAL_DATASET (`of`): its own, the only one, or None."""
        count = len(getattr(self, of))
        return list(values) if len(values) == count else [values[0] if values else None] * count

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation rows."""
        return bool(self.eval_dataset) or self.eval_fraction > 0

    @property
    def default_split(self) -> str:
        """Split of DATASET where none is given; only the default dataset is cut to the course's 1,000 rows."""
        return "train[:1000]" if self.dataset == [DEFAULT_DATASET] and not self.max_rows else "train"

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
