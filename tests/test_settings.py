"""Settings: order, cleaning, every mistake at once, secrets, and the files generated from them."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import generated
from train import console


def settings(result) -> dict:
    assert result.status == 0, result.err
    return json.loads(result.out)


def test_defaults_are_the_courses_recipe(run):
    defaults = settings(run("config"))
    recipe = {
        "MODEL_ID": "meta-llama/Llama-3.1-8B",
        "DATASET": ["databricks/databricks-dolly-15k"],
        "LOAD_IN_4BIT": True,
        "BNB_4BIT_QUANT_TYPE": "nf4",
        "BNB_4BIT_USE_DOUBLE_QUANT": True,
        "LORA_R": 16,
        "LORA_ALPHA": 32,
        "LORA_DROPOUT": 0.05,
        "TARGET_MODULES": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "EFFECTIVE_BATCH_SIZE": 16,
        "LEARNING_RATE": 2e-4,
        "NUM_TRAIN_EPOCHS": 1.0,
        "MAX_LENGTH": 512,
        "ACTIVATION_CHECKPOINTING": True,
        "OPTIM": "paged_adamw_8bit",
        "LOGGING_STEPS": 10,
        "REPORT_TO": ["none"],
    }
    assert {name: defaults[name] for name in recipe} == recipe


def test_environment_stands_above_env_file_above_defaults(run):
    Path(".env").write_text("LORA_R=4\nLORA_ALPHA=5\n")
    given = settings(run("config", LORA_R=6))
    assert (given["LORA_R"], given["LORA_ALPHA"], given["SEED"]) == (6, 5, 42)


def test_all_mistakes_are_reported_at_once(run):
    Path(".env").write_text("LEARNING_RATE=fast\nLORA_ALFA=3\nPLUM=1\nEVAL_FRACTION=2\nREPORT_TO=wandb,tensorbord\n")
    result = run("config", OPTIM="adam")
    assert result.status == 2
    assert "Traceback" not in result.err
    for said in (
        'LEARNING_RATE is "fast": allowed: number, above 0',
        "LORA_ALFA: is not a setting; did you mean LORA_ALPHA?",
        "PLUM: is not a setting",
        'EVAL_FRACTION is "2": allowed: number, at least 0, below 1',
        'OPTIM is "adam": allowed: adamw_torch | ',
        'REPORT_TO is "wandb,tensorbord"',
    ):
        assert said in result.err


@pytest.mark.parametrize(
    ("slip", "right"),
    [
        ("LERNING_RATE", "LEARNING_RATE"),
        ("LEARNING_RATES", "LEARNING_RATE"),
        ("MAX_LENGHT", "MAX_LENGTH"),
        ("MAXLENGTH", "MAX_LENGTH"),
        ("max_length", "MAX_LENGTH"),
        ("HF_TOKN", "HF_TOKEN"),
        ("BNB_4BIT_QUANT_TYP", "BNB_4BIT_QUANT_TYPE"),
    ],
)
def test_a_name_one_slip_away_is_refused_from_the_environment(run, slip, right):
    result = run("config", **{slip: "1"})
    assert result.status == 2
    assert f"{slip}: is not a setting; did you mean {right}?" in result.err


def test_names_of_other_programs_are_left_alone_and_handed_on(run, monkeypatch):
    Path(".env").write_text("HF_HUB_OFFLINE=1\nWANDB_PROJECT=plum\nCUDA_VISIBLE_DEVICES=0\nhttps_proxy=http://x\n")
    assert run("config", PLUM="a name in the environment that is nobody's", LOGLEVEL="torch's own").status == 0
    assert os.environ["WANDB_PROJECT"] == "plum"


def test_what_docker_leaves_in_values_is_trimmed(run):
    given = settings(
        run(
            "config",
            MODEL_ID='"./model"',
            DATASET="'./train.jsonl'   # the rows",
            LEARNING_RATE="2e-3\t# tab before the hash",
            MAX_STEPS="4 # short run",
            OUTPUT_DIR="./out#1\r",
            MODEL_REVISION='""',
        )
    )
    assert given["MODEL_ID"] == "./model"
    assert given["DATASET"] == ["./train.jsonl"]
    assert (given["LEARNING_RATE"], given["MAX_STEPS"]) == (2e-3, 4)
    assert given["OUTPUT_DIR"] == "./out#1"
    assert given["MODEL_REVISION"] is None


def test_what_an_env_file_quotes_is_kept(run):
    Path(".env").write_text("""MODEL_ID="./a 'b' # c"\nDATASET='"rows".jsonl'\nOUTPUT_DIR=out # folder\n""")
    given = settings(run("config"))
    assert (given["MODEL_ID"], given["DATASET"], given["OUTPUT_DIR"]) == ("./a 'b' # c", ['"rows".jsonl'], "out")


def test_home_is_expanded_in_folders(run):
    given = settings(
        run("config", MODEL_ID="~/model", DATASET="a, ~/rows.jsonl", OUTPUT_DIR="~/out", HOME="/home/plum")
    )
    folders = [given[name] for name in ("MODEL_ID", "DATASET", "OUTPUT_DIR")]
    assert folders == ["/home/plum/model", ["a", "/home/plum/rows.jsonl"], "/home/plum/out"]


def test_a_quote_without_its_partner_is_refused_by_name(run):
    result = run("config", MODEL_ID='"./model')
    assert result.status == 2
    assert "MODEL_ID" in result.err and "quote" in result.err


def test_a_broken_line_and_a_missing_env_file_are_refused(run):
    Path("broken.env").write_text("LORA_R=8\nthis is no setting\n")
    result = run("config", "--env-file", "broken.env")
    assert result.status == 2 and "broken.env, line 2" in result.err
    assert run("config", "--env-file", "none.env").status == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"PER_DEVICE_TRAIN_BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 5, "EFFECTIVE_BATCH_SIZE": 16}, "is 15"),
        ({"PER_DEVICE_TRAIN_BATCH_SIZE": 3}, "does not divide EFFECTIVE_BATCH_SIZE=16"),
        ({"MAX_STEPS": 4, "NUM_TRAIN_EPOCHS": 1}, "both say when to stop"),
        ({"EARLY_STOPPING_PATIENCE": 2}, "needs evaluation rows"),
        ({"EVAL_DATASET": "x", "EVAL_FRACTION": 0.1}, "both name evaluation rows"),
        ({"EVAL_FRACTION": 0.1, "EVAL_STEPS": 2, "SAVE_STEPS": 3}, "must be a multiple of EVAL_STEPS"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(run, given, said):
    result = run("config", **given)
    assert result.status == 2
    assert said in result.err


def test_a_secret_comes_from_a_file_and_is_never_shown(run):
    Path("token").write_text("hf_plumplumplum\n")
    result = run("config", HF_TOKEN_FILE="token")
    assert settings(result)["HF_TOKEN"] == "********"
    assert os.environ["HF_TOKEN"] == "hf_plumplumplum"
    del os.environ["HF_TOKEN_FILE"]
    for style in ("env", "markdown", "json"):
        shown = run("config", "--format", style)
        assert shown.status == 0
        assert "hf_plumplumplum" not in shown.out + shown.err


def test_a_secret_put_where_its_file_belongs_is_not_shown(run):
    result = run("config", HF_TOKEN_FILE="hf_plumplumplum")
    assert result.status == 2
    assert "HF_TOKEN_FILE" in result.err and "plum" not in result.err


def test_an_empty_secret_in_quotes_is_none_to_the_libraries_either(run):
    assert settings(run("config", HF_TOKEN='""', WANDB_API_KEY="'wandb_plum'"))["HF_TOKEN"] is None
    assert "HF_TOKEN" not in os.environ
    assert os.environ["WANDB_API_KEY"] == "wandb_plum"


def test_a_wrong_secret_is_refused_without_showing_it(run):
    result = run("config", HF_TOKEN="hf_plum plum", LORA_R=0)
    assert result.status == 2
    assert "HF_TOKEN" in result.err and "plum" not in result.err
    Path("token").write_text("hf_x")
    assert "both given" in run("config", HF_TOKEN="hf_y", HF_TOKEN_FILE="token").err


def test_settings_written_as_an_env_file_read_back_the_same(run):
    first = settings(
        run("config", LORA_R=6, MODEL_ID="./a b", TARGET_MODULES="q_proj,v_proj", EVAL_FRACTION=0.123456789)
    )
    written = run("config", "--format", "env").out
    for name in ("LORA_R", "MODEL_ID", "TARGET_MODULES", "EVAL_FRACTION"):
        del os.environ[name]
    Path("again.env").write_text(written)
    assert settings(run("config", "--env-file", "again.env")) == first


@pytest.mark.parametrize("name", ['a "b" c', "a\\ b", "a ${HOME} b", "a '$b' \t c"])
def test_quotes_and_dollars_written_as_an_env_file_read_back_the_same(run, name):
    written = run("config", "--format", "env", MODEL_ID=name).out
    del os.environ["MODEL_ID"]
    Path(".env").write_text(written)
    assert settings(run("config"))["MODEL_ID"] == name


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("\x1b[31mred", "control character U+001B"),
        ("a\rb", "control character U+000D"),
        ("a\x9bb", "control character U+009B"),
        (os.fsdecode(b"caf\xe9"), "is not UTF-8 text"),
    ],
)
def test_what_cannot_be_printed_is_refused_by_name_and_not_printed(run, value, reason):
    for name in ("MODEL_ID", "LORA_R", "TARGET_MODULES"):
        result = run("config", **{name: value})
        assert result.status == 2
        assert name in result.err and reason in result.err and value not in result.err
        del os.environ[name]
    result = run("config", f"--env-file={value}")
    assert result.status == 2 and value not in result.err


def test_a_nul_in_an_env_file_is_refused_with_its_line(run):
    Path(".env").write_text("LORA_R=8\nHF_HOME=a\0b\n")
    result = run("config")
    assert result.status == 2 and ".env, line 2" in result.err


def test_an_env_files_name_may_be_too_long_for_the_file_system(run):
    assert "there is no env file" in run("config", "--env-file", "x" * 300).err


def test_a_list_of_nothing_is_refused(run):
    result = run("config", TARGET_MODULES=",", REPORT_TO=" , ")
    assert result.status == 2
    assert 'TARGET_MODULES is ","' in result.err and 'REPORT_TO is ","' in result.err


def test_a_user_without_home_is_told_to_write_the_path(run, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    result = run("config", OUTPUT_DIR="~/out")
    assert result.status == 2 and "OUTPUT_DIR" in result.err and "no home folder" in result.err


def test_a_secret_of_one_letter_leaves_the_message_whole(run, monkeypatch):
    monkeypatch.setattr(console, "_secrets", set())  # not for the tests after this one
    assert run("config", HF_TOKEN="r").status == 0
    assert run("config", HF_TOKEN="r", LORA_R=0).err.startswith("error: ")


@pytest.mark.parametrize("file", generated.files(), ids=lambda file: file.name)
def test_generated_files_are_fresh(file):
    assert file.read_text() == generated.files()[file], "run make docs"


def test_no_verb_prints_help_and_exits_2(run):
    result = run()
    assert result.status == 2
    assert "generate" in result.err
    assert run("train", "--help").status == 0


def test_version_names_the_packages_that_decide_the_result(run):
    shown = run("version").out
    assert f"torch {version('torch')}\n" in shown and f"bitsandbytes {version('bitsandbytes')}\n" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"DATASET": "a,b", "DATASET_WEIGHTS": "1"}, "DATASET_WEIGHTS has 1 values for 2 of DATASET"),
        ({"DATASET": "a,b,c", "DATASET_SPLIT": "train,test"}, "DATASET_SPLIT has 2 values for 3 of DATASET"),
        ({"EVAL_DATASET": "a,b,c", "EVAL_DATASET_CONFIG": "x,y"}, "EVAL_DATASET_CONFIG has 2 values for 3"),
        ({"DATASET_WEIGHTS": "0"}, "each above 0"),
        ({"DATASET_WEIGHTS": "3", "EVAL_FRACTION": "0.5"}, "EVAL_FRACTION would hold out copies"),
        ({"DATASET": ","}, "DATASET is"),
        ({"STREAMING": "true"}, "STREAMING needs MAX_ROWS"),
        ({"PROMPT_TEMPLATE": "{a}", "PROMPT_COLUMN": "a"}, "PROMPT_TEMPLATE and PROMPT_COLUMN"),
        ({"MAX_DROPPED_FRACTION": "1.5"}, "at most 1"),
    ],
)
def test_settings_of_the_rows_that_contradict_each_other_are_refused(run, given, said):
    result = run("config", **given)
    assert result.status == 2 and said in result.err


def test_prose_keeps_its_quotes_and_hashes_and_gets_line_breaks(run):
    given = settings(run("config", SYSTEM_PROMPT=r'Say "plum" # twice.\nThen say "stop"'))
    assert given["SYSTEM_PROMPT"] == 'Say "plum" # twice.\nThen say "stop"'
