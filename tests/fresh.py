"""Programs in processes of their own, which have imported torch and nothing of Weft.

They are forked of one process for all tests of a worker: to import torch takes two seconds of a processor.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

# The end of this text runs in the process that was forked, as `python -c` runs a program: so do its exit and errors.
_FORKS = """
import json, os, sys
import torch
for line in sys.stdin:
    program = os.fork()
    if program == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), flush=True)
else:
    os._exit(0)
asked = json.loads(line)
for name, number in (("out", 1), ("err", 2)):
    os.dup2(os.open(asked[name], os.O_WRONLY), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update(asked["environment"])
os.chdir(asked["cwd"])
sys.argv[1:] = asked["words"]
exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
"""


def run(
    code: str, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, check: bool = False
) -> CompletedProcess[str]:
    """As subprocess.run of `python -c`, with what it says; env: without PYTHONPATH, which is that of the tests."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        environment = dict(os.environ if env is None else env)
        asked = {"code": code, "words": words, "environment": environment, "cwd": str(cwd or Path.cwd())}
        forks = _process()
        assert forks.stdin is not None and forks.stdout is not None
        print(json.dumps(asked | {"out": out.name, "err": err.name}), file=forks.stdin, flush=True)
        ended = int(forks.stdout.readline())
        done = CompletedProcess(code, ended, out.read().decode(), err.read().decode())
    if check:
        assert done.returncode == 0, done.stderr
    return done


@cache
def _process() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _FORKS], stdin=pipe, stdout=pipe, text=True)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """It ends with what it reads."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()
