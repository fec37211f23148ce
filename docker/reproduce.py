"""Build the image twice from the last commit, in two folders, without cache, and compare layer by layer.

usage: make reproduce-image      exit status 0 where all layers are equal; else the files that differ are listed

What is compared is what the layers hold. The image's own digest also covers the time of building, which only a
BuildKit of 0.13 or newer sets from SOURCE_DATE_EPOCH (with rewrite-timestamp): the release workflow uses that one.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

DOCKER = os.environ["DOCKER"]
IMAGE = os.environ["IMAGE"]
TAGS = [f"{IMAGE}-{copy}" for copy in ("first", "second")]
SHOWN = 50


def build(folder: Path, tag: str) -> list[str]:
    """Clone, build, and return the layers' digests."""
    subprocess.run(["git", "clone", "--quiet", ".", folder], check=True)
    options = f"{os.environ.get('BUILD_OPTIONS', '')} --no-cache"
    command = ["make", "--no-print-directory", "-C", folder, "build", f"IMAGE={tag}", f"BUILD_OPTIONS={options}"]
    subprocess.run(command, check=True)
    asked = [DOCKER, "image", "inspect", "--format", "{{json .RootFS.Layers}}", tag]
    layers: list[str] = json.loads(subprocess.run(asked, check=True, capture_output=True).stdout)
    return layers


def contents(tag: str, folder: Path) -> list[dict[str, tuple[object, ...]]]:
    """What each layer holds: path to kind, mode, owner, date, link target and hash."""
    archive = folder / "image.tar"
    subprocess.run([DOCKER, "save", "--output", archive, tag], check=True)
    found = []
    with tarfile.open(archive) as image:
        (manifest,) = json.load(image.extractfile("manifest.json"))
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=image.extractfile(name)) as layer:
                found.append({member.name: _described(layer, member) for member in layer})
    archive.unlink()
    return found


def _described(layer: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[object, ...]:
    digest = hashlib.file_digest(layer.extractfile(member), "sha256").hexdigest() if member.isfile() else ""
    return member.type, oct(member.mode), member.uid, member.gid, member.mtime, member.linkname, digest


def main() -> int:
    try:
        return compare()
    finally:
        subprocess.run([DOCKER, "rmi", "--force", *TAGS], check=False, capture_output=True)


def compare() -> int:
    """Build twice, print what is equal and what is not; the exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("one", "another-folder")]
        first, second = (build(folder, tag) for folder, tag in zip(folders, TAGS, strict=True))
        for number, pair in enumerate(zip(first, second, strict=True), start=1):
            print(f"layer {number}: {pair[0]} {'equal' if pair[0] == pair[1] else 'DIFFERS from ' + pair[1]}")
        if first == second:
            print(f"reproducible: {len(first)} layers are equal")
            return 0
        held = [contents(tag, Path(scratch)) for tag in TAGS]
        for number, (ours, theirs) in enumerate(zip(*held, strict=True), start=1):
            differ = sorted(path for path in {*ours, *theirs} if ours.get(path) != theirs.get(path))
            for path in differ[:SHOWN]:
                print(f"layer {number}: /{path}: {ours.get(path)} {theirs.get(path)}")
            print(f"layer {number}: {len(differ)} paths differ")
    return 1


if __name__ == "__main__":
    sys.exit(main())
