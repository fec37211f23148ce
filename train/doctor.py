"""Is this machine, this output folder, this tracker fit for this run? Each check says what it found, or refuses."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from train import model, rows, skeleton, targets, templates
from train.config import Config
from train.console import Exit, Refusal, warn
from train.gpu import NO_GPU
from train.record import driver_version

# A checkpoint of the adapter with its optimizer stays far below this.
LEAST_FREE_BYTES = 2 * 2**30


def machine(config: Config) -> str:
    """The GPU, or the CPU where the user asked for it by name."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        others = torch.cuda.device_count() - 1
        idle = f"; {others} more visible and idle" if others else ""
        return f"{torch.cuda.get_device_name()}, {total:.1f} GiB, driver {driver_version()}{idle}"
    if config.allow_cpu:
        return f"CPU with {torch.get_num_threads()} threads, as ALLOW_CPU=true allows"
    if driver := driver_version():
        what = f"the NVIDIA driver {driver} is too old for this build (CUDA {torch.version.cuda})"
        fix = "CUDA 13.0 needs driver 580 or newer, CUDA 12.8 needs 570: take another host or the other image"
        raise Refusal(what, fix, Exit.MACHINE)
    raise NO_GPU


def arithmetic(config: Config) -> str:
    """The type that is computed in."""
    dtype, reason = model.compute_dtype(config)
    return f"{dtype} ({reason})"


def output(config: Config) -> str:
    """The output folder can be written and has room."""
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        there = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
        status = there.stat()
        raise Refusal(
            f"OUTPUT_DIR={folder} cannot be written by user {os.getuid()}: {error.strerror}; {there} belongs to user "
            f"{status.st_uid} and has mode {status.st_mode & 0o777:o}",
            f"start as that user (docker run --user {status.st_uid}), or chown -R {os.getuid()} {there}, or set OUTPUT_DIR "
            "to another folder",
            Exit.MACHINE,
        ) from error
    in_container = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
    if in_container and folder.stat().st_dev == Path("/").stat().st_dev:
        warn(f"OUTPUT_DIR={folder} is inside the container and goes with it: mount a folder (-v $PWD/outputs:/outputs)")
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise Refusal(f"only {free / 2**30:.1f} GiB are free in {folder}", "free at least 2 GiB", Exit.MACHINE)
    return f"{folder}, {free / 2**30:.0f} GiB free"


def trackers(config: Config) -> str:
    """Every tracker asked for is installed and has its key."""
    wanted = [name for name in config.report_to if name != "none"]
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise Refusal(f"REPORT_TO={name}, but its package is not here", f"install {name}, or set REPORT_TO=none")
    if "wandb" in wanted and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        from wandb.sdk.lib.wbauth import read_netrc_auth  # heavy, and wanted by few

        host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        if not (config.wandb_api_key or read_netrc_auth(host=host)):
            raise Refusal(
                "REPORT_TO=wandb needs WANDB_API_KEY", "set WANDB_API_KEY, or WANDB_MODE=offline", Exit.MACHINE
            )
    return ", ".join(wanted) or "none"


def dataset(config: Config) -> str:
    """The rows can be read and have a known shape."""
    return "; ".join(
        f"{name}: {', '.join(source.name for source in rows.named(config)[name])}, {account.used:,} rows usable, "
        f"by the columns {account.seen()}"
        for name, account in rows.survey(config).items()
    )


def tokens(config: Config) -> str:
    """What would be learned: rows, lengths, drops and cuts; no weights are loaded."""
    surveyed = rows.survey(config)
    tokenizer = model.load_tokenizer(config)
    template, _, why = templates.of_model(config, tokenizer, model.load_model_config(config))
    accounts = rows.account_for(config, template, surveyed)
    learned = (f"{done.supervised:,} tokens learned of {done.used:,} {name} rows" for name, done in accounts.items())
    return f"{'; '.join(learned)}; {why}"


def base_model(config: Config) -> str:
    """Configuration and tokenizer can be read, the target layers are there, and the weights fit; none are loaded."""
    architecture = model.load_model_config(config)
    model.load_tokenizer(config)
    bare = skeleton.build(config, architecture)
    weight = skeleton.weight(config, bare, model.compute_dtype(config)[0])
    targets.check_targets(config, bare)
    return f"{config.model_id}, {architecture.model_type}, {weight}"


CHECKS: dict[str, Callable[[Config], str]] = {
    "machine": machine,
    "arithmetic": arithmetic,
    "output": output,
    "trackers": trackers,
    "dataset": dataset,
    "model": base_model,
}
