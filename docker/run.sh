#!/bin/sh
# Runs a verb in the image, or in .venv where there is no engine (a rented pod is a container already).
# usage: RUNTIME=docker|venv run.sh VERB [ARGUMENT ...]      from make, which sets DOCKER, IMAGE and VENV
#
# In the image this folder is /work, read-only, and so is all it names by relative paths; outputs/ can be written.
set -eu
: "${HF_HOME:=$HOME/.cache/huggingface}"

case $RUNTIME in
venv)
    echo "in $VENV (RUNTIME=docker uses the image)" >&2
    exec "$VENV/bin/python" -m train "$@"
    ;;
docker) echo "in the image $IMAGE (RUNTIME=venv does without)" >&2 ;;
*) echo "error: RUNTIME is \"$RUNTIME\": allowed: docker | venv" >&2; exit 2 ;;
esac
if ! "$DOCKER" image inspect "$IMAGE" >/dev/null 2>&1 && [ "$IMAGE" = qlora-train ]; then make build; fi

# The engine would make missing host folders, as root.
mkdir -p outputs .cache/image "$HF_HOME"

# Settings of this shell stand above those of .env, which the verb reads itself.
names=$(sed -n 's/^#\{0,1\}\([A-Z0-9_]*\)=.*/\1/p' env.example)
names="$names HF_TOKEN_FILE WANDB_API_KEY_FILE HF_ENDPOINT HF_HUB_OFFLINE WANDB_MODE WANDB_PROJECT WANDB_ENTITY"
arguments=$(for name in $names; do if printenv "$name" >/dev/null; then printf ' --env %s' "$name"; fi; done)
if [ -t 0 ] && [ -t 2 ]; then arguments="$arguments --interactive --tty"; fi
if "$DOCKER" info 2>/dev/null | grep -qi nvidia || command -v nvidia-container-runtime-hook >/dev/null; then
    arguments="$arguments --gpus all"
fi
# shellcheck disable=SC2086  # the arguments are words
exec "$DOCKER" run --rm --init=false --ipc=host --stop-timeout 120 $arguments \
    --volume "$PWD:/work:ro" --volume "$PWD/outputs:/work/outputs" --workdir /work \
    --volume "$PWD/.cache/image:/cache" --volume "$HF_HOME:/cache/huggingface" \
    "$IMAGE" "$@"
