#!/bin/sh
# Runs a verb. As root over a folder that is someone else's, it becomes that owner first: results are never root's.
set -eu

owner=0:0
if [ "$(id -u)" = 0 ]; then
    # The first of these that belongs to someone else; `docker run --env-file` keeps the quotes of a value.
    for folder in "$(echo "${OUTPUT_DIR:-outputs}" | tr -d "\"'")" "$@" /outputs; do
        while [ ! -e "$folder" ]; do folder=$(dirname -- "$folder"); done
        owner=$(stat --format %u:%g -- "$folder")
        if [ "${owner%:*}" != 0 ]; then break; fi
    done
fi
if [ "${owner%:*}" = 0 ]; then exec /opt/venv/bin/python -m train "$@"; fi

as_owner="setpriv --reuid ${owner%:*} --regid ${owner#*:} --clear-groups --"
if ! $as_owner true 2>/dev/null; then
    echo "error: root may not become the results' owner $owner here" >&2
    echo "fix: start the container with --user $owner" >&2
    exit 3
fi
# What an earlier start as root left in the cache would be closed to the owner.
if [ -w /cache ]; then find /cache -xdev -user 0 -exec chown --no-dereference "$owner" {} +; fi
exec $as_owner /opt/venv/bin/python -m train "$@"
