"""Scripts of bench/ and docs/ as programs of their own, in processes that need not import PyTorch again."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent


def load_script(path: str) -> ModuleType:
    """Import a script that is in no package, such as ``docker/check_record.py``, by its path in the checkout."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def script_in_this_process(script: str, words: list[str], folder: str) -> None:
    """Run ``script`` as ``python script words`` does, from ``folder``, with its output in ``folder.log``."""
    log = os.open(f"{folder}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_script(script: Path, words: list[str], folder: Path) -> tuple[int | None, str]:
    """Exit code (``None`` after ten minutes) and output of a script that runs in the empty ``folder``."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.scripts", "torch", "server.engines.inline", "server.run.conduct"])
    arguments = (str(script), words, str(folder))
    process = context.Process(target=script_in_this_process, args=arguments)
    process.start()
    process.join(570)
    code = process.exitcode
    if code is None:
        process.terminate()
        process.join()
    return code, Path(f"{folder}.log").read_text(errors="replace")
