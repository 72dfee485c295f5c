"""What `doctor` prints."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from glm5_next.launchers import doctor
from glm5_next.launchers.doctor import Finding

console = Console(highlight=False, soft_wrap=True)


def examine(*, lock: Path | None, interface: str | None, folder: Path, gpu: bool, as_json: bool) -> bool:
    """Prints every finding; returns whether there is no problem."""
    findings = [
        *doctor.check_versions(lock or doctor.default_lock()),
        *doctor.check_packages(),
        *doctor.check_backends(),
        *doctor.check_network(interface),
        *doctor.check_room(folder),
    ]
    if gpu:
        findings += _watched_gpu_check()
    problems = [item for item in findings if item.problem]
    if as_json:
        listed = [asdict(item) for item in findings]
        console.print_json(json.dumps({"ok": not problems, "findings": listed}))
    else:
        _print(findings, problems)
    return not problems


def _watched_gpu_check() -> Iterator[Finding]:
    """Says how far it is: the first use of a kernel on a machine compiles and tunes it."""
    with Console(stderr=True).status("computing every backend; kernels new to this machine take minutes") as status:
        for finding in doctor.check_gpu():
            status.update(f"{finding.name}: {finding.problem or finding.value}")
            yield finding


def _print(findings: list[Finding], problems: list[Finding]) -> None:
    table = Table("", *(Column(heading, overflow="fold") for heading in ("name", "found", "problem")))
    topic = ""
    for item in findings:
        if topic and item.topic != topic:
            table.add_section()
        table.add_row("" if item.topic == topic else item.topic, item.name, item.value, item.problem or "")
        topic = item.topic
    console.print(table, markup=False)
    for item in problems:
        console.print(f"problem: {item.topic} {item.name}: {item.problem}", markup=False)
    console.print("nothing is wrong" if not problems else f"{len(problems)} problem(s)")
