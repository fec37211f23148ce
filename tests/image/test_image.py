"""What the image does: how it refuses, whom its results belong to, how it stops, what it weighs and what it hides."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import certifi
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT, WEIGHTS, record_of
from tests.image.conftest import DOCKER, IMAGE, OWNER, docker, layers, owned

# Bytes above the base image, by layer: system packages, Python packages (CUDA 12.8's libraries are larger), our code.
PACKAGES = {"13.0": 5.2e9, "12.8": 7.7e9}[os.environ.get("CUDA", "13.0")]
BUDGET = {"apt-get": 350e6, "LOCK=": PACKAGES, "COPY /image": 1e6}


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_help_and_settings_that_are_wrong():
    assert "generate" in docker("run", "--rm", IMAGE, check=False).stderr
    assert docker("run", "--rm", IMAGE, check=False).returncode == 2
    assert docker("run", "--rm", IMAGE, "train", "--help").returncode == 0
    wrong = docker("run", "--rm", "--env", "LEARNING_RATE=fast", "--env", "MAX_LENGHT=9", IMAGE, "train", check=False)
    assert wrong.returncode == 2
    assert 'LEARNING_RATE is "fast"' in wrong.stderr and "did you mean MAX_LENGTH?" in wrong.stderr


def test_without_a_gpu_it_says_so_at_once():
    refused = docker("run", "--rm", IMAGE, "train", check=False, timeout=5)
    assert refused.returncode == 3
    assert "--gpus all" in refused.stderr


def test_the_demos_recipe_leaves_a_loadable_adapter_that_belongs_to_the_hosts_user(tmp_path):
    outputs = owned(tmp_path / "outputs")
    mounts = ["--volume", f"{ROOT}:/work:ro", "--volume", f"{outputs}:/outputs", "--workdir", "/work"]
    place = ["--env", "OUTPUT_DIR=/outputs/demo"]  # a fresh checkout has no outputs/ to mount over
    trained = docker("run", "--rm", *mounts, *place, IMAGE, "train", "--env-file", "demo/demo.env", check=False)
    assert trained.returncode == 0, trained.stderr
    run = record_of(outputs / "demo")
    assert run["last_loss"] < 0.75 * run["first_loss"]
    assert {path.stat().st_uid for path in outputs.rglob("*")} == {OWNER}
    assert all(path.stat().st_mode & 0o044 for path in files_of(outputs / "demo/adapter"))
    base = AutoModelForCausalLM.from_pretrained(ROOT / ".cache/SmolLM2-135M-Instruct")
    PeftModel.from_pretrained(base, str(outputs / "demo/adapter"))


def test_make_train_runs_in_the_image_with_the_settings_of_env_file_and_shell(tmp_path, tiny_model, rows):
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
    shutil.copytree(tiny_model, checkout / "models/tiny").chmod(0o755)
    elsewhere = owned(tmp_path / "elsewhere") / "rows.jsonl"
    further = owned(tmp_path / "further") / "rows.jsonl"
    for file in (elsewhere, further):
        shutil.copyfile(rows, file)
    results = tmp_path / "results/run"
    settings = {"MODEL_ID": '"models/tiny"  # ours', "DATASET": f"{elsewhere},{further}", "OUTPUT_DIR": results}
    settings["LORA_R"] = 2
    (checkout / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()) + "ALLOW_CPU=1\n")
    for folder in (checkout / ".cache/image", tmp_path / "hf", tmp_path / "results/run"):
        owned(folder)
    asked = ["make", "-C", str(checkout), "train", "RUNTIME=docker"]
    home = {"HF_HOME": str(tmp_path / "hf"), "LORA_R": "4"}
    made = subprocess.run(asked, env=os.environ | home, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert f"in the image {IMAGE}" in made.stderr
    run = record_of(results)
    assert (run["status"], run["settings"]["LORA_R"]) == ("finished", 4)
    assert run["train_rows"]["used"] == 48
    assert {path.stat().st_uid for path in results.rglob("*")} == {OWNER}
    slip = subprocess.run(
        asked, env=os.environ | home | {"MAX_LENGHT": "9"}, capture_output=True, text=True, check=False
    )
    assert "did you mean MAX_LENGTH?" in slip.stderr


@pytest.mark.parametrize("options", [(), ("--user", f"{OWNER}:{OWNER}")], ids=["root steps down", "--user"])
def test_any_user_trains_on_a_read_only_root(container, options):
    made = container("--read-only", "--tmpfs", "/tmp", *options)
    trained = made.run("train")
    assert trained.returncode == 0, trained.stderr
    assert (made.outputs / WEIGHTS).is_file()
    assert {path.stat().st_uid for folder in (made.outputs, made.cache) for path in folder.rglob("*")} == {OWNER}


def test_a_model_that_its_owner_alone_may_read_is_named(container, tiny_model, tmp_path):
    own = Path(shutil.copytree(tiny_model, tmp_path / "own-model"))
    own.chmod(0o755)
    made = container("--user", "4322:4322")
    made.outputs.chmod(0o777)
    made.cache.chmod(0o777)
    for closed in (own / "model.safetensors", own):
        closed.chmod(0o700 if closed.is_dir() else 0o600)
        made.model = own
        refused = made.run("train")
        assert refused.returncode == 2
        assert f"user 4322 may not read /model{'' if closed == own else '/model.safetensors'}" in refused.stderr


def test_results_are_never_roots_whatever_an_earlier_start_left(container):
    made = container()
    mounts = ["--volume", f"{made.cache}:/cache", "--volume", f"{made.rows}:/rows.jsonl:ro"]
    asroot = ["--env", "DATASET=/rows.jsonl", "--env", "MODEL_ID=/none", IMAGE, "check"]
    docker("run", "--rm", *mounts, *asroot, check=False)
    assert {path.stat().st_uid for path in made.cache.rglob("*")} == {0}
    checked = made.run("check", OUTPUT_DIR='"/outputs/run"')  # quoted, as `docker run --env-file` leaves it
    assert checked.returncode == 0, checked.stdout
    assert {path.stat().st_uid for folder in (made.outputs, made.cache) for path in folder.rglob("*")} == {OWNER}


def test_results_that_would_go_with_the_container_are_warned_of():
    nothing = ["--env", "DATASET=/none.jsonl", "--env", "MODEL_ID=/none"]
    said = docker("run", "--rm", "--env", "ALLOW_CPU=1", *nothing, IMAGE, "check", check=False)
    assert "mount a folder" in said.stderr


def test_docker_stop_saves_the_step_and_the_same_command_goes_on(container):
    made = container()
    settings = {"NUM_TRAIN_EPOCHS": 2000, "LOGGING_STEPS": 1, "SAVE_STEPS": 100_000}
    docker("run", "--detach", *made.arguments("train", **settings))
    made.wait_for("step 3/")
    assert docker("exec", made.name, "cat", "/proc/1/comm").stdout == "tini\n"
    docker("stop", "--time", "60", made.name)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", made.name).stdout == "75\n"
    (checkpoint,) = (made.outputs / "checkpoints").glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert checkpoint.name == f"checkpoint-{state['global_step']}"
    assert {"adapter_model.safetensors", "optimizer.pt", "rng_state.pth"} <= {
        path.name for path in checkpoint.iterdir()
    }
    docker("rm", made.name)

    docker("run", "--detach", *made.arguments("train", **settings))
    made.wait_for(f"step {state['global_step'] + 1}/")


def test_nothing_listens_and_nothing_is_a_volume():
    config = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", IMAGE).stdout)
    assert not config.get("ExposedPorts") and not config.get("Volumes")
    labels = config["Labels"]
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert labels["org.opencontainers.image.revision"] == head.stdout.strip()
    assert labels["org.opencontainers.image.base.name"]


def test_what_lies_in_the_checkout_stays_out_of_the_build(tmp_path):
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
    for secret in (".env", "hf_token", "outputs/run.json", "train/__pycache__/recipe.pyc"):
        (checkout / secret).parent.mkdir(exist_ok=True)
        (checkout / secret).write_text("hf_plumplumplum")
    everything = "FROM scratch\nCOPY . /\n"
    docker("build", "--tag", f"{IMAGE}-context", "--file", "-", checkout, input=everything)
    held = subprocess.run([DOCKER, "save", f"{IMAGE}-context"], capture_output=True, check=True).stdout
    docker("rmi", f"{IMAGE}-context")
    assert b"def train(config: Config)" in held
    assert b"hf_plumplumplum" not in held


def test_the_builds_secret_is_in_no_layer_and_no_history():
    """The certificate of a proxy that the world does not know, where the build was given one."""
    assert "CERTIFICATE" not in docker("history", "--no-trunc", IMAGE).stdout
    bundle = os.environ.get("CA_BUNDLE")
    if bundle:
        public = docker("run", "--rm", "--entrypoint", "cat", IMAGE, "/etc/ssl/certs/ca-certificates.crt").stdout
        private = set(Path(bundle).read_text().split()) - set(public.split()) - set(certifi.contents().split())
        lines = sorted(line for line in private if len(line) == 64)[:8]
        assert lines, f"{bundle} holds no certificate of its own"
        save = subprocess.Popen([DOCKER, "save", IMAGE], stdout=subprocess.PIPE)
        search = ["grep", "--text", "--count", "--fixed-strings", "\n".join(lines)]
        found = subprocess.run(search, stdin=save.stdout, env={"LC_ALL": "C"}, check=False)
        assert save.wait() == 0 and found.returncode == 1


def test_the_layers_stay_within_their_budget(capsys):
    listed = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", IMAGE).stdout
    sizes = [(float(line.split("\t")[0]), line.split("\t")[1]) for line in listed.splitlines()]
    with capsys.disabled():
        print()
        for size, made_by in sizes:
            if size:
                print(f"{size / 1e6:10,.1f} MB  {made_by[:90]}")
        print(f"{sum(size for size, _ in sizes) / 1e6:10,.1f} MB  in all")
    for part, budget in BUDGET.items():
        (size,) = [size for size, made_by in sizes if part in made_by and size]
        assert size < budget, part


def test_a_change_of_code_rebuilds_the_last_layer_only(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".venv*", ".cache", ".uv", "outputs"))
    with (checkout / "train/recipe.py").open("a") as file:
        file.write("# a change\n")
    subprocess.run(["make", "-C", checkout, "build", f"IMAGE={IMAGE}-changed"], check=True, capture_output=True)
    before, after = layers(IMAGE), layers(f"{IMAGE}-changed")
    docker("rmi", f"{IMAGE}-changed")
    assert before[:-1] == after[:-1] and before[-1] != after[-1]
