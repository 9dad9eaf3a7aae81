"""The output of a module of this folder: JSON, one value per line, from a separate process."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["interprets", "printed"]


@functools.cache
def interprets() -> bool:
    """Whether there is a Triton whose interpreter runs kernels: 3.5 does not end."""
    if importlib.util.find_spec("triton") is None:
        return False
    return tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) >= (3, 6)


# Importing torch takes longer than most programs, so one process imports it, and a fork of that
# process runs each program. No device and no Triton is imported before a fork.
_SERVER = """
import json, os, runpy, sys, recollect, tests.gpu.passes

for line in sys.stdin:
    output, errors, module, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(output, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY), 2)
        sys.argv = [module, *arguments]
        runpy.run_module(f"tests.gpu.{module}", run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that is forked; it ends with this one, which holds its input open."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def _running() -> Iterator[subprocess.Popen[str]]:
    """The server, which ends with its fork when the test is interrupted."""
    server = _server()
    try:
        yield server
    except BaseException:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
        _server.cache_clear()
        raise


def printed(module: str, *arguments: str) -> list[Any]:
    """Return every line that a module prints, decoded.

    Args:
        module: of `tests.gpu`.
        arguments: of its command line.
    """
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        with _running() as server:
            assert server.stdin is not None and server.stdout is not None
            request = [output.name, errors.name, module, *arguments]
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            status = server.stdout.readline()
        assert status == "0\n", (status, errors.read()[-4000:])
        return [json.loads(line) for line in output.read().splitlines()]
