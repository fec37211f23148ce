#!/bin/sh
# Runs a verb in the image, or in .venv where there is no engine (a rented pod is a container already).
# usage: RUNTIME=docker|venv run.sh VERB|shell [ARGUMENT ...]      from make, which sets DOCKER, IMAGE and VENV
#
# In the image this folder is /work, read-only, and so is all it names by relative paths. The output folder can be
# written; model and rows that lie elsewhere on the host are mounted where they are.
# shellcheck disable=SC2046,SC2086  # DOCKER may be two words, such as `sudo docker`
set -eu
case $RUNTIME in
venv)
    echo "in $VENV (RUNTIME=docker uses the image)" >&2
    exec "$VENV/bin/python" -m train "$@"
    ;;
docker) echo "in the image $IMAGE (RUNTIME=venv does without)" >&2 ;;
*) echo "error: RUNTIME is \"$RUNTIME\": allowed: docker | venv" >&2; exit 2 ;;
esac

verb=$1; shift
count=$#  # of the verb's own arguments; the engine's come behind them and are moved to the front at the end

# The shell's names, but for those that mean the host's own folders and programs, stand above .env's.
for name in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
    case $name in
    PATH | HOME | USER | LOGNAME | SHELL | SHLVL | PWD | OLDPWD | TERM | TMPDIR | HOSTNAME | MAIL | _ | LANG | LC_* | XDG_*) ;;
    PYTHON* | VIRTUAL_ENV | CONDA* | PIP_* | UV_* | LD_* | MAKE* | MFLAGS | GIT_* | SSH_* | DBUS_*) ;;
    DOCKER* | IMAGE | RUNTIME | VENV | CUDA | CUDA_HOME | CUDA_PATH | NVIDIA_* | SOURCE_DATE_EPOCH) ;;
    HF_HOME | *_CACHE | *_CACHE_DIR | *CERT* | *CA_BUNDLE | OUTPUT_DIR) ;;
    HF_TOKEN_FILE | WANDB_API_KEY_FILE)
        set -- "$@" --volume "$(realpath "$(printenv "$name")"):/run/secrets/$name:ro" --env "$name=/run/secrets/$name"
        ;;
    *) set -- "$@" --env "$name" ;;
    esac
done

# What the settings of shell and .env come to, with ~ as the host means it.
env_file=; if [ "$count" -ge 2 ] && [ "$1" = --env-file ]; then env_file="$1 $2"; fi
settings=$($DOCKER run --rm --volume "$PWD:/work:ro" --workdir /work --env "HOME=$HOME" \
    $(env | sed -n 's/^\(MODEL_ID\|DATASET\|EVAL_DATASET\|OUTPUT_DIR\)=.*/--env \1/p') "$IMAGE" config --format env $env_file)
setting() { echo "$settings" | sed -n "s/^#\{0,1\}$1=\"\{0,1\}\([^\"]*\)\"\{0,1\}\$/\1/p"; }
for name in MODEL_ID DATASET EVAL_DATASET; do
    value=$(setting $name)
    case $value in /* | *,/*) set -- "$@" --env "$name=$value" ;; esac
    IFS=,
    for path in $value; do  # DATASET may name several
        case $path in /*) if [ -e "$path" ]; then set -- "$@" --volume "$path:$path:ro"; fi ;; esac
    done
    unset IFS
done
# The engine would make missing host folders, as root.
output=$(setting OUTPUT_DIR)
: "${HF_HOME:=$HOME/.cache/huggingface}"
mkdir -p "$output" .cache/image "$HF_HOME"
case $output in /*) inside=$output ;; *) inside=/work/$output ;; esac
set -- "$@" --volume "$(realpath "$output"):$inside" --env "OUTPUT_DIR=$inside"

if [ -t 0 ] && [ -t 2 ]; then set -- "$@" --interactive --tty; fi
if $DOCKER info --format '{{json .Runtimes}}' 2>/dev/null | grep -q nvidia || nvidia-smi -L >/dev/null 2>&1; then
    set -- "$@" --gpus all
fi
if [ "$verb" = shell ]; then set -- "$@" --entrypoint bash "$IMAGE"; else set -- "$@" "$IMAGE" "$verb"; fi
while [ "$count" -gt 0 ]; do
    first=$1; shift; set -- "$@" "$first"
    count=$((count - 1))
done
exec $DOCKER run --rm --ipc=host --stop-timeout 120 --workdir /work --volume "$PWD:/work:ro" \
    --volume "$PWD/.cache/image:/cache" --volume "$HF_HOME:/cache/huggingface" "$@"
