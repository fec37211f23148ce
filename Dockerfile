# The training image. `make build` says what each argument is given.
ARG BASE_IMAGE=nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1

# What the system provides: Python, tini as PID 1, and a C compiler with headers, which Triton calls at run time.
FROM ${BASE_IMAGE} AS system
# Build steps get their files under /mnt, on a tmpfs: the mounts leave no empty folders in the layers. settle.sh deletes
# the package lists; the packages' versions are those that the base's distribution has on the day.
# hadolint ignore=DL3008,DL3009
RUN --mount=type=tmpfs,target=/mnt --mount=type=bind,source=docker/settle.sh,target=/mnt/settle.sh \
    set -eu; begun=$(date +%s); \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates gcc libc6-dev python3 python3-dev tini; \
    sh /mnt/settle.sh "$begun"

# The installer, in a stage of its own: the image does not carry it.
FROM system AS uv
ARG PACKAGE_INDEX
# hadolint ignore=DL3008,DL3009
RUN --mount=type=secret,id=ca,target=/mnt/ca --mount=type=bind,source=requirements/uv.lock,target=/mnt/uv.lock \
    set -eu; if [ -s /mnt/ca ]; then export PIP_CERT=/mnt/ca; fi; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3-venv; \
    python3 -m venv /uv; \
    /uv/bin/pip install --no-cache-dir --require-hashes ${PACKAGE_INDEX:+--index-url "$PACKAGE_INDEX"} -r /mnt/uv.lock

# The locked packages with their bytecode, checked to be the torch that this variant is for.
FROM system AS packages
ARG LOCK=requirements.lock
ARG CUDA=13.0
ARG PACKAGE_INDEX
ENV PATH=/opt/venv/bin:$PATH
RUN --mount=type=tmpfs,target=/mnt --mount=type=secret,id=ca,target=/mnt/ca \
    --mount=type=cache,target=/mnt/cache --mount=type=bind,from=uv,source=/uv/bin/uv,target=/mnt/uv \
    --mount=type=bind,source=requirements.lock,target=/mnt/requirements.lock \
    --mount=type=bind,source=requirements/cuda12.8.lock,target=/mnt/requirements/cuda12.8.lock \
    --mount=type=bind,source=docker/trim.sh,target=/mnt/trim.sh \
    --mount=type=bind,source=docker/check_torch.py,target=/mnt/check_torch.py \
    --mount=type=bind,source=docker/settle.sh,target=/mnt/settle.sh \
    set -eu; begun=$(date +%s); \
    if [ -s /mnt/ca ]; then export SSL_CERT_FILE=/mnt/ca; fi; \
    if [ -n "${PACKAGE_INDEX:-}" ]; then export UV_DEFAULT_INDEX="$PACKAGE_INDEX"; fi; \
    export UV_CACHE_DIR=/mnt/cache UV_LINK_MODE=copy PYC_INVALIDATION_MODE=UNCHECKED_HASH; \
    /mnt/uv venv --quiet --python /usr/bin/python3 /opt/venv; \
    /mnt/uv pip sync --quiet --require-hashes --compile-bytecode --python /opt/venv "/mnt/$LOCK"; \
    sh /mnt/trim.sh /opt/venv/lib/python3.*/site-packages "$CUDA"; \
    python /mnt/check_torch.py "/mnt/$LOCK" "$CUDA"; \
    sh /mnt/settle.sh "$begun"

# Our own code, given one date so that every checkout of a commit makes the same layer.
FROM system AS code
COPY train /image/opt/train/train
COPY docker/entrypoint.sh /image/usr/local/bin/entrypoint
RUN --mount=type=bind,source=docker/settle.sh,target=/mnt/settle.sh \
    set -eu; mkdir --mode=1777 /image/outputs /image/cache; \
    chmod -R u=rwX,go=rX /image/opt /image/usr; \
    chmod 755 /image/usr/local/bin/entrypoint; \
    python3 -m compileall -q --invalidation-mode unchecked-hash -s /image /image/opt/train; \
    sh /mnt/settle.sh 0 /image

FROM packages AS image
COPY --from=code /image /
# Caches go to /cache; whoever the user is, Python and torch find a name and a home for them.
ENV PYTHONPATH=/opt/train PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
    HOME=/cache USER=train LOGNAME=train XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    HF_HUB_DISABLE_TELEMETRY=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# OUTPUT_DIR's default, outputs, is /outputs from here.
WORKDIR /
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/entrypoint"]

ARG BASE_IMAGE BASE_DIGEST REVISION VERSION SOURCE
LABEL org.opencontainers.image.title="QLoRA training image" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
