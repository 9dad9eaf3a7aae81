"""One check of devices: the library and the command line accept and refuse equal names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recollect as rc
from recollect.report.devices import available_devices, resolve_device


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recollect.report.devices.available_devices", lambda: ["cpu", "cuda:0", "cuda:1", "mps"]
    )
    names = {"cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1", "mps": "mps"}
    for name, device in names.items():
        assert resolve_device(name, argument_name="device") == torch.device(device)
    with pytest.raises(ValueError, match="--device 'cuda:2' is not here: torch sees cpu, cuda:0"):
        resolve_device("cuda:2", argument_name="--device")


def test_reproduce_refuses_a_device_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'tpu:9' is not here: torch sees cpu"):
        rc.reproduce("ttr-fig2", scale="smoke", device="tpu:9", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_line_accepts_every_available_device() -> None:
    typer = pytest.importorskip("typer")
    from recollect.cli.options import check_device

    for name in available_devices():
        check_device(name)
    with pytest.raises((typer.BadParameter, ValueError), match="is not here"):
        check_device("tpu:9")
