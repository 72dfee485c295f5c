"""The image's lock: writes it (`update`) and prints one environment of it as a pip requirements file with hashes.

    python docker/lock.py requirements trainer            # wheels
    python docker/lock.py requirements trainer --sdists   # what exists as source only, and is compiled
    python docker/lock.py update                          # needs uv and a package index; both architectures must resolve

Only `update` needs anything beyond Python.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOCK = HERE / "lock.json"
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_34")


def requirements(environment: str, *, sdists: bool) -> list[str]:
    """Lines `name==version --hash=...` of what is installed from wheels, or of what is built from source."""
    packages = json.loads(LOCK.read_text())["environments"][environment]["packages"]
    kind = "sdist" if sdists else "wheel"
    return [
        " ".join([f"{name}=={entry['version']}", *(f"--hash=sha256:{value}" for value in entry["sha256"])])
        for name, entry in packages.items()
        if entry["kind"] == kind
    ]


def update() -> None:
    """Resolves every environment of the lock again from its own inputs; keeps images and inputs."""
    lock = json.loads(LOCK.read_text())
    for name, environment in lock["environments"].items():
        resolved = [_resolve(environment, lock["python"], platform) for platform in PLATFORMS]
        environment["packages"] = _merged(name, resolved)
    LOCK.write_text(json.dumps(lock, indent=1) + "\n")


def _resolve(environment: dict[str, Any], python: str, platform: str) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        inputs, overrides, out = (Path(scratch) / name for name in ("inputs.txt", "overrides.txt", "pylock.toml"))
        inputs.write_text("\n".join(environment["inputs"]))
        overrides.write_text("\n".join(environment["overrides"]))
        command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--output-file", str(out)]
        command += ["--python-version", python, "--python-platform", platform, "--override", str(overrides)]
        command += [part for file in environment["constraints"] for part in ("--constraint", file)]
        command += [part for extra in environment["extras"] for part in ("--extra", extra)]
        source = "pyproject.toml" if environment["extras"] else str(inputs)
        subprocess.run([*command, source], cwd=HERE.parent, check=True)
        return {package["name"]: package for package in tomllib.loads(out.read_text())["packages"]}


def _merged(name: str, resolved: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One list for all platforms; raises ValueError where they differ in a version."""
    merged: dict[str, dict[str, Any]] = {}
    for packages in resolved:
        for package, found in packages.items():
            files = found.get("wheels") or [found["sdist"]]
            kind = "wheel" if found.get("wheels") else "sdist"
            entry = merged.setdefault(package, {"version": found["version"], "kind": kind, "sha256": []})
            if (entry["version"], entry["kind"]) != (found["version"], kind):
                raise ValueError(f"{name}: {package} is {entry['version']} or {found['version']}, by platform")
            entry["sha256"] = sorted({*entry["sha256"], *(file["hashes"]["sha256"] for file in files)})
    return dict(sorted(merged.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("update")
    printing = commands.add_parser("requirements")
    printing.add_argument("environment")
    printing.add_argument("--sdists", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "update":
        update()
    else:
        sys.stdout.write("".join(f"{line}\n" for line in requirements(arguments.environment, sdists=arguments.sdists)))


if __name__ == "__main__":
    main()
