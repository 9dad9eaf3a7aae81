"""The environment of a measurement: device, versions, commit, date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Hardware, software and source of a measurement."""

    device: str  # name of the processor or GPU
    device_type: str  # "cpu" or "cuda"
    threads: int  # number of CPU threads of torch
    python: str  # version of Python
    torch: str  # version of torch
    system: str  # operating system and machine type
    # commit of the source tree, with -dirty if it had changes outside results; "unknown" without a
    # source tree
    commit: str
    date: str  # UTC, ISO 8601 to the second

    def facts(self) -> dict[str, str]:
        """Return names and values to print."""
        return {
            "device": f"{self.device}, {self.threads} CPU thread{'' if self.threads == 1 else 's'}",
            "software": f"torch {self.torch}, Python {self.python}, {self.system}",
            "commit": self.commit,
            "date": self.date,
        }

    def to_dict(self) -> dict[str, str | int]:
        """Return the fields for JSON."""
        return asdict(self)


def describe_environment(device: torch.device | str | None = None) -> Environment:
    """Describe this machine and source tree; the default device is a GPU if there is one."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return Environment(
        device=name,
        device_type=device.type,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        system=f"{platform.system()} {platform.machine()}",
        commit=_commit(Path(__file__).parent),
        date=now.isoformat().replace("+00:00", "Z"),
    )


def _processor() -> str:
    """Return the model of the CPU from the system if it is available, else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit(folder: Path) -> str:
    """Return the commit of this package's tree; a copy inside another tree has none."""
    try:
        tracked = _git(folder, "ls-files", "--", "environment.py")
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        if not tracked:
            return "unknown"
        # Saved results do not change a measurement.
        changed = _git(folder, "status", "--porcelain", "--", ":/", ":(top,exclude)results")
        return commit + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
