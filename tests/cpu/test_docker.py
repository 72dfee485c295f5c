"""The image's lock against what the package asks for, its Dockerfile, and the part of its installation that needs no GPU."""

import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from glm5_next.launchers.doctor import LOCK_VARIABLE
from glm5_next.launchers.engines.command import ENGINE_PYTHON

ROOT = Path(__file__).resolve().parents[2]
LOCK = json.loads((ROOT / "docker/lock.json").read_text())
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENTS = LOCK["environments"]
# What `glm5-next --help` needs: small, and all wheels without a GPU in them.
PART = (
    "typer",
    "click",
    "rich",
    "shellingham",
    "typing-extensions",
    "annotated-doc",
    "markdown-it-py",
    "mdurl",
    "pygments",
)


def printed(environment: str, *arguments: str) -> list[str]:
    command = [sys.executable, ROOT / "docker/lock.py", "requirements", environment, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def mismatches(wanted: list[str], packages: dict) -> list[str]:
    """Requirements that the locked versions do not meet."""
    found = []
    for requirement in map(Requirement, wanted):
        entry = packages.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
        if entry is None or not requirement.specifier.contains(entry["version"], prereleases=True):
            found.append(str(requirement))
    return found


def test_the_trainers_environment_has_what_the_package_asks_for():
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
    assert mismatches(wanted, ENVIRONMENTS["trainer"]["packages"]) == []
    assert mismatches(["torch>=99", "absent"], ENVIRONMENTS["trainer"]["packages"]) == ["torch>=99", "absent"]


def test_the_trainers_environment_is_the_one_the_tests_run_with():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    locked = {name: entry["version"] for name, entry in ENVIRONMENTS["trainer"]["packages"].items()}
    tested = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    different = {
        name: (version, tested[name]) for name, version in locked.items() if tested.get(name, version) != version
    }
    assert not different and len(locked.keys() & tested.keys()) > 60


def test_the_engine_is_the_one_that_was_read():
    packages = ENVIRONMENTS["engine"]["packages"]
    assert ENVIRONMENTS["engine"]["inputs"] == ["sglang==0.5.23"]
    assert mismatches(["sglang==0.5.23", "torch==2.14.1", "transformers==5.19.0", "tilelang==0.1.12"], packages) == []


def test_one_environment_would_not_do():
    """When this fails, the environments can become one."""
    assert {env: ENVIRONMENTS[env]["packages"]["tilelang"]["version"] for env in ("trainer", "engine")} == {
        "trainer": "0.1.15",
        "engine": "0.1.12",
    }


def test_trainer_and_engine_have_one_nccl():
    """A group of two versions is refused by NCCL, and weights are sent in one."""
    trainer, engine = (ENVIRONMENTS[name]["packages"]["nvidia-nccl-cu13"] for name in ("trainer", "engine"))
    assert trainer == engine and f"nvidia-nccl-cu13=={engine['version']}" in ENVIRONMENTS["trainer"]["overrides"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_package_is_printed_once_with_its_hashes(name):
    lines = printed(name) + printed(name, "--sdists")
    assert len(lines) == len(ENVIRONMENTS[name]["packages"])
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.+!-]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_the_dockerfile_names_no_version_of_its_own():
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert bases == [LOCK["images"]["base"]] and re.fullmatch(r"\S+:[\w.-]+@sha256:[0-9a-f]{64}", bases[0])
    assert "latest" not in DOCKERFILE and "==" not in DOCKERFILE and "://" not in DOCKERFILE
    assert set(re.findall(r"python(3\.\d+)", DOCKERFILE)) == {LOCK["python"]}
    installs = re.findall(r"/bin/pip install (.*)", DOCKERFILE)
    assert len(installs) == 5 and all("--no-deps" in line for line in installs)
    assert all("--require-hashes" in line or "./source" in line for line in installs)


def test_a_run_in_the_image_finds_its_lock_and_the_engines_python():
    assert f"{LOCK_VARIABLE}=/opt/glm5-next/trainer.txt" in DOCKERFILE
    assert f"{ENGINE_PYTHON}=/opt/glm5-next/engine/bin/python" in DOCKERFILE


def test_what_the_dockerfile_copies_is_there_and_is_not_ignored():
    kept = {
        line[1:] for line in (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() and source in kept


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """An empty environment, as the image makes one."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder / "trainer", with_pip=True)
    return folder


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [folder / "trainer/bin/pip", "install", "--quiet", "--no-deps", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_locked_packages_install_by_their_hashes_and_the_command_runs(clean: Path):
    """The image's own steps, on the part of the trainer's environment that the command line needs."""
    lines = [line for line in printed("trainer") if line.split("==")[0] in (*PART, "setuptools")]
    assert len(lines) == len(PART) + 1
    (clean / "part.txt").write_text("\n".join(lines))
    done = install(clean, "--require-hashes", "--only-binary=:all:", "--requirement", str(clean / "part.txt"))
    assert done.returncode == 0, done.stderr
    source = clean / "source"
    source.mkdir()
    for name in ("pyproject.toml", "plugins", "bridge", "launchers"):
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    done = install(clean, "--no-build-isolation", str(source))
    assert done.returncode == 0, done.stderr
    told = subprocess.run([clean / "trainer/bin/glm5-next", "--help"], capture_output=True, text=True, check=False)
    assert told.returncode == 0 and "doctor" in told.stdout, told.stderr


def test_another_file_than_the_locked_one_is_not_installed(clean: Path):
    (line,) = [line for line in printed("trainer") if line.startswith("mdurl==")]
    (clean / "wrong.txt").write_text(line.split()[0] + " --hash=sha256:" + "0" * 64)
    options = ("--require-hashes", "--ignore-installed", "--no-cache-dir", "--requirement", str(clean / "wrong.txt"))
    done = install(clean, *options)
    assert done.returncode and "do not match the hashes" in done.stderr.lower(), done.stderr


def test_the_dockerfile_is_linted(clean: Path):
    (clean / "lint.txt").write_text("\n".join(printed("lint")))
    done = install(clean, "--require-hashes", "--requirement", str(clean / "lint.txt"))
    assert done.returncode == 0, done.stderr
    linter = clean / "trainer/bin/hadolint"
    lint = subprocess.run([linter, "-"], input=DOCKERFILE, capture_output=True, text=True, check=False)
    assert lint.returncode == 0, lint.stdout
    worse = re.sub(r"FROM \S+", "FROM nvidia/cuda:latest", DOCKERFILE)
    lint = subprocess.run([linter, "-"], input=worse, capture_output=True, text=True, check=False)
    assert lint.returncode and "DL3007" in lint.stdout
