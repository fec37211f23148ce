#!/bin/sh
# Ends a build step: what differs from one build to the next goes, and all that the step wrote gets one date.
# usage: settle.sh SECONDS_WHEN_THE_STEP_BEGAN [FOLDER]
set -eu
begun=$1 folder=${2:-/}
date=2026-12-01T00:00:00Z

if [ "$folder" = / ]; then
    # Emptied, not deleted, where the base may have the file too: the mark of a deletion carries the hour.
    find /var/log /var/cache/ldconfig /var/cache/debconf/*-old -type f -newerct "@$begun" -exec truncate --size 0 {} +
    find /var/lib/apt/lists /var/cache/apt /root -xdev -type f -newerct "@$begun" -delete
fi
# By change time: it tells what this step wrote, whatever date a package gave its files. The builder's own mounts, such
# as /etc/hosts, cannot be written.
find "$folder" -xdev -newerct "@$begun" -newermt "$date" \( -type l -o -writable \) -exec touch --no-dereference --date="$date" {} +
