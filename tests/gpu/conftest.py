"""Settings of tests on a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _whole_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start no test in a process whose CUDA context a kernel has broken.

    Such a context returns the error of that kernel for every call, so all later tests would fail. A
    worker of xdist ends, and another replaces it; a single process ends the run.
    """
    yield
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        message = f"{request.node.nodeid} has broken the CUDA context: {error}"
        if "PYTEST_XDIST_WORKER" in os.environ:
            print(message, file=sys.stderr, flush=True)
            os._exit(1)
        pytest.exit(message, returncode=1)
