"""The command line: `python -m train VERB`."""

import argparse
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from train import gpu
from train.config import Config
from train.console import Exit, Refusal, has_terminal, masked, notes, refuse, result, say, table
from train.environment import read_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit status: see `console.Exit`; 1 for what nobody foresaw.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if not given.verb:
        parser.print_help(sys.stderr)
        return Exit.SETTINGS
    # It proposes, when imported, a CPU kernel that loses gradients: see model.load_base.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # docker stop is to end like Ctrl-C, not silently
    try:
        given.run(given)
        return Exit.DONE
    except Refusal as refusal:
        refuse(refusal)
        status = int(refusal.code)
        trace = traceback.format_exc()
    except KeyboardInterrupt:
        refuse(
            Refusal(
                "stopped by a signal",
                "the same command goes on from the last checkpoint, if there is one",
                Exit.STOPPED,
            )
        )
        return Exit.STOPPED
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line, no traceback
        status = _unforeseen(error)
        trace = traceback.format_exc()
    if getattr(given, "debug", False):
        notes.print(masked(trace))
    return status


def _settings(given: argparse.Namespace) -> Config:
    config = read_config(given.env_file)
    given.debug = config.log_level == "debug"
    return config


def _unforeseen(error: Exception) -> int:
    if type(error).__name__ == "OutOfMemoryError":
        smaller = "lower PER_DEVICE_TRAIN_BATCH_SIZE, then MAX_LENGTH, or set ACTIVATION_CHECKPOINTING=true"
        refuse(Refusal(f"out of GPU memory: {str(error).splitlines()[0]}", smaller))
        return Exit.MEMORY
    refuse(Refusal(f"{type(error).__name__}: {error}", "LOG_LEVEL=debug shows where; please report it"))
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train", description="QLoRA fine-tuning from environment variables.", epilog="`config` lists the settings."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    def verb(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument(
            "--env-file", metavar="FILE", help="read settings from FILE (default: .env, if there is one)"
        )
        return added

    verb("train", _train, "Fine-tune, and leave the adapter in OUTPUT_DIR.")
    check = verb("check", _check, "See whether machine, settings, data and model are fit; trains nothing.")
    check.add_argument(
        "--data", action="store_true", help="tokenise every row and say what would be learned, cut and dropped"
    )
    generate = verb("generate", _generate, "Answer prompts with an adapter on its base model.")
    generate.add_argument("--adapter", required=True, metavar="DIR", help="folder with adapter_config.json")
    generate.add_argument("--prompt", required=True, action="append", metavar="TEXT", help="may be given several times")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without chat template")
    generate.add_argument("--compare", action="store_true", help="show the base model's answers beside the adapter's")
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    merge = verb("merge", _merge, "Write the base model with the adapter worked into its 16-bit weights.")
    merge.add_argument("--adapter", required=True, metavar="DIR", help="folder with adapter_config.json")
    merge.add_argument("--out", required=True, metavar="DIR", help="new folder for the merged model")
    config = verb("config", _config, "Print the settings in force, secrets masked.")
    config.add_argument(
        "--format", choices=("json", "env", "markdown"), default="json", help="markdown is the table of all settings"
    )
    verb("version", _version, "Print the versions of Python and the packages that decide the result.")
    return parser


def _quiet_libraries() -> None:
    """Progress bars for people only, and warnings that ask nothing of the user left out."""
    import warnings

    import datasets
    import huggingface_hub.utils
    import transformers

    # TRL reads a name that transformers has renamed; the user can do nothing about it.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")  # the recipe says it
    # PEFT looks for these patterns among modules only, and applies them to whole parameters all the same.
    warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys", category=RuntimeWarning)
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # it sets this right by itself
    transformers.logging.set_verbosity_error()
    if not has_terminal():
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
        transformers.logging.disable_progress_bar()


def _train(given: argparse.Namespace) -> None:
    config = _settings(given)
    gpu.refuse_none(config)
    say("loading libraries")
    from train import recipe

    _quiet_libraries()
    recipe.train(config)


def _check(given: argparse.Namespace) -> None:
    config = _settings(given)
    from train import doctor

    _quiet_libraries()
    refusals = []
    for name, check in ({"data": doctor.tokens} if given.data else doctor.CHECKS).items():
        try:
            result(f"ok    {name}: {check(config)}")
        except Refusal as refusal:
            result(f"FAIL  {name}: {refusal.what}")
            result(f"      fix: {refusal.fix}")
            refusals.append(refusal)
    if refusals:
        names = "1 check" if len(refusals) == 1 else f"{len(refusals)} checks"
        raise Refusal(f"{names} failed", "see above", max(refusal.code for refusal in refusals))


def _generate(given: argparse.Namespace) -> None:
    config = _settings(given)
    from train import answers

    _quiet_libraries()
    for prompt, base, tuned in answers.generate(
        config, given.adapter, given.prompt, given.max_new_tokens, compare=given.compare, raw=given.raw
    ):
        if given.compare:
            table(("base", "tuned"), [(base, tuned)], title=prompt)
        else:
            result(tuned)


def _merge(given: argparse.Namespace) -> None:
    config = _settings(given)
    from train import merge, merge_report

    _quiet_libraries()
    adapter, out = given.adapter, Path(given.out)
    config = merge.merge(config, adapter, out)
    merge_report.report(config, Path(adapter), out)


def _config(given: argparse.Namespace) -> None:
    from train import settings_text

    config = _settings(given)
    written = {
        "json": settings_text.as_json,
        "env": settings_text.as_env,
        "markdown": lambda _: settings_text.as_markdown(),
    }
    sys.stdout.write(written[given.format](config).rstrip("\n") + "\n")


def _version(given: argparse.Namespace) -> None:
    from train import record

    for name, number in record.versions().items():
        result(f"{name} {number}")


if __name__ == "__main__":
    sys.exit(main())
