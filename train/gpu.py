"""Is there a GPU to be seen? Answered without torch, whose import takes seconds."""

import ctypes
from pathlib import Path

from train.config import Config
from train.console import Exit, Refusal

NO_GPU = Refusal(
    "there is no GPU to be seen",
    "in a container add --gpus all; to train on the CPU all the same, set ALLOW_CPU=true",
    Exit.MACHINE,
)


def driver_is_there() -> bool:
    """Whether NVIDIA's driver library loads; the container toolkit brings it into a container that gets a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def devices() -> list[str]:
    """The device files of NVIDIA GPUs."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def refuse_none(config: Config) -> None:
    """Refuse at once where there is no driver and the CPU is not allowed."""
    if config.allow_cpu or driver_is_there():
        return
    if found := devices():
        raise Refusal(
            f"{found[0]} is there, but the driver's library libcuda.so.1 is not",
            "install the NVIDIA Container Toolkit on the host and start with --gpus all, not with --device; to train on "
            "the CPU all the same, set ALLOW_CPU=true",
            Exit.MACHINE,
        )
    raise NO_GPU
