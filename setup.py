"""Metadata is in pyproject.toml. Each build starts from nothing: setuptools would install what build/ still has."""

import shutil
from pathlib import Path

from setuptools import setup

shutil.rmtree(Path(__file__).with_name("build"), ignore_errors=True)
setup()
