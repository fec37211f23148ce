#!/bin/sh
# Runs a verb. As root over a folder that is someone else's, it becomes that owner first: results are never root's.
set -eu

if [ "$(id -u)" = 0 ]; then
    folder=${OUTPUT_DIR:-outputs}
    while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
    owner=$(stat --format %u:%g "$folder")
    # The image's own /outputs is root's: nothing of the host's is there.
    if [ "${owner%:*}" != 0 ]; then
        # A host folder that the engine had to make is root's.
        if [ -w /cache ] && [ "$(stat --format %u /cache)" = 0 ]; then chown "$owner" /cache; fi
        exec setpriv --reuid "${owner%:*}" --regid "${owner#*:}" --clear-groups -- /opt/venv/bin/python -m train "$@"
    fi
fi
exec /opt/venv/bin/python -m train "$@"
