"""Packages and folders of the user's own, which a process knows until it ends; these tests share one process."""

from __future__ import annotations

import sys

from common import choices
from common.choices import FOLDERS
from common.versions import code_files, code_sha256


def forget(package: str) -> None:
    """All that a process learns of a user's ``package`` and of folders of choices, as if another one had begun."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    del FOLDERS[1:]
    choices._OWN_NAMES.difference_update([name for name in choices._OWN_NAMES if name.partition(".")[0] == package])
    choices._names_in_files.cache_clear()
    code_sha256.cache_clear()
    code_files.cache_clear()
