"""What is installed: pins for every platform, what is declared and imported, and a device that needs little."""

from __future__ import annotations

import ast
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from common.versions import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Mapping[str, list[str]] = PROJECT["optional-dependencies"]
PACKAGES = ("common", "strategies", "client", "server", "goldfinch")
PINS = [
    Requirement(line)
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
PLATFORMS = {
    "linux-x86_64": ("linux", "x86_64", "x86_64-manylinux_2_28"),
    "linux-aarch64": ("linux", "aarch64", "aarch64-manylinux_2_28"),
    "macos-arm64": ("darwin", "arm64", "aarch64-apple-darwin"),
}
SOURCE_ONLY = ("antlr4-python3-runtime", "iterators")
"""Small packages in pure Python that publish no wheel."""


def names(requirements: list[str]) -> set[str]:
    """Canonical names, extras of the project itself taken apart."""
    found = set()
    for item in map(Requirement, requirements):
        if item.name == PROJECT["name"]:
            found |= set().union(*(names(EXTRAS[extra]) for extra in item.extras))
        else:
            found.add(canonicalize_name(item.name))
    return found


def pinned_on(platform: str) -> list[Requirement]:
    system, machine, _ = PLATFORMS[platform]
    environment = {"sys_platform": system, "platform_machine": machine, "python_full_version": "3.11.9"}
    return [pin for pin in PINS if pin.marker is None or pin.marker.evaluate(environment)]


def test_the_version_is_one() -> None:
    assert PROJECT["version"] == VERSION


INSTALLED = re.compile(r"(?:pip|uv) install[^\n#;]*?['\"\s](goldfinch[\w-]*)")


def test_no_page_names_the_unrelated_distribution_to_install() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines() if not name.startswith("tests/")]
    texts = [path.read_text() for path in paths if path.is_file() and path.suffix in (".py", ".md", ".sh", ".html", "")]
    assert {name for text in texts for name in INSTALLED.findall(text)} <= {PROJECT["name"]}
    assert INSTALLED.findall("pip install 'goldfinch[datasets]'") == ["goldfinch"]


def steps_of_setup(folder: Path, *words: str) -> list[str]:
    """The calls of pip that ``make setup`` would make."""
    command = ["make", "--dry-run", "setup", f"VENV={folder}", "EXTRAS=device", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    steps = [line for line in done.stdout.splitlines() if "-m pip --log" in line]
    assert all("--constraint requirements.txt" in step for step in steps)
    assert steps[-1].endswith("--editable '.[device]'")
    return steps


@pytest.mark.parametrize("index", ["", "https://wheels.example/cpu"], ids=["any torch", "a CPU's"])
def test_setup_installs_the_extras_and_the_torch_that_are_asked_for(index: str, tmp_path: Path) -> None:
    steps = steps_of_setup(tmp_path, f"TORCH_INDEX={index}", "DRIVER=there")
    assert [step.partition("--index-url ")[2] for step in steps[:-2]] == [f'"{index}" torch torchvision'] * bool(index)


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has CUDA on Linux alone")
def test_setup_without_a_driver_tries_the_cpu_build_of_the_pinned_torch_and_says_what_the_other_costs(
    tmp_path: Path,
) -> None:
    pins = (ROOT / "requirements.txt").read_text()
    versions = [re.search(rf"^{name}==(\S+)", pins, re.MULTILINE) for name in ("torch", "torchvision")]
    torch, torchvision = (version[1] for version in versions if version)
    first, *others = steps_of_setup(tmp_path, "DRIVER=")
    build, _, otherwise = first.partition(" 2>/dev/null || ")
    assert build.endswith(f" torch=={torch}+cpu torchvision=={torchvision}+cpu")
    assert "4.3 GB more. TORCH_INDEX=<index of PyTorch's CPU wheels> leaves it out" in otherwise
    assert len(others) == 2
    assert steps_of_setup(tmp_path, "DRIVER=", "TORCH_INDEX=https://wheels.example/cpu")[1:] == others
    assert len(steps_of_setup(tmp_path, "DRIVER=", "CHECK_HASHES=1")) == 2, "no hash of such a build is recorded"


def test_setup_says_where_its_seconds_went(tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    log.write_text(
        """2026-11-27T14:00:00,120 Collecting torch==2.14.1+cpu
2026-11-27T14:00:03,000 ERROR: No matching distribution found for torch==2.14.1+cpu
2026-11-27T14:00:05,000 Collecting torch
  a line without a time
2026-11-27T14:03:20,000 Installing collected packages: torch, numpy
2026-11-27T14:04:00,000 Successfully installed numpy-2.4.6 torch-2.14.1
2026-11-27T14:04:01,000 Collecting ray
2026-11-27T14:04:31,000 Installing collected packages: ray
2026-11-27T14:04:36,000 Successfully installed ray-2.55.1
"""
    )
    command = [sys.executable, ROOT / "docker" / "set_up_times.py", log, "31"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set up: resolving and fetching 230 s, unpacking 45 s, compiling 31 s\n"


@pytest.mark.parametrize(
    ("words", "gigabytes"),
    [
        (["EXTRAS=device", "TORCH_INDEX=https://wheels.example/cpu"], 2),
        (["EXTRAS=device"], 5.5),
        (["EXTRAS=device,server", "TORCH_INDEX=https://wheels.example/cpu"], 4),
        ([], 7.5),
    ],
)
def test_setup_needs_the_disk_that_its_parts_need(words: list[str], gigabytes: float, tmp_path: Path) -> None:
    df = tmp_path / "df"
    df.write_text(f"#!/bin/sh\necho head\necho disk 0 0 {gigabytes * 1e6 - 1:.0f}\n")
    df.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "setup", f"VENV={tmp_path / 'venv'}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert f"{gigabytes:g} GB must be free here before the environment is made." in done.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("has", "words", "sets_up"),
    [
        ("device privacy python3.11", ["EXTRAS=device"], False),
        ("device privacy python3.11", ["EXTRAS=device,privacy"], False),
        ("device python3.11", ["EXTRAS=device,server"], True),
        ("device python3.11", ["EXTRAS=device", f"PYTHON={sys.executable}"], sys.version_info[:2] != (3, 11)),
        ("device python3.0", ["EXTRAS=device", f"PYTHON={sys.executable}"], True),
        ("", ["EXTRAS=device"], True),
    ],
    ids=["there", "both there", "one missing", "this Python", "another Python", "an earlier set-up"],
)
def test_setup_installs_again_what_the_environment_lacks(
    has: str, words: list[str], sets_up: bool, tmp_path: Path
) -> None:
    (tmp_path / ".ready").write_text(has)
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (" -m pip " in done.stdout) == sets_up


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("EXTRAS=device,serevr", "there is no 'serevr'; separated by commas alone, there are clustering "),
        ("EXTRAS=device, server", "there is no ' server'; separated by commas alone, there are clustering "),
        ("PYTHON=", "needs Python 3.11 to 3.14, and found none; set PYTHON="),
        ("PYTHON=python2.6", "needs Python 3.11 to 3.14, and python2.6 is not one; set PYTHON="),
    ],
)
def test_setup_names_what_does_not_fit_and_makes_nothing(setting: str, said: str, tmp_path: Path) -> None:
    words = ["make", "setup", setting, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_below_a_blank_makes_the_environment_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "my house"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    command = ["make", "--dry-run", "setup"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment)
    (made,) = [line.split()[-1] for line in done.stdout.splitlines() if " -m venv " in line]
    assert made.startswith(f"{tmp_path}/.cache/goldfinch/venv-")
    assert f'ln -s "{made}" .venv' in done.stdout


def tracked_files(folder: Path) -> None:
    """Copy the files that git knows into ``folder``."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


BUILD = "from setuptools import build_meta; print(build_meta.{}({!r}))"


@pytest.mark.slow
def test_what_was_deleted_is_not_built_again_and_a_source_archive_is_whole(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    tracked_files(checkout)

    def build(what: str) -> list[str]:
        code = BUILD.format(what, str(tmp_path / "built"))
        subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, check=True)
        if what == "build_wheel":
            (wheel,) = (tmp_path / "built").glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                return archive.namelist()
        (source,) = (tmp_path / "built").glob("*.tar.gz")
        with tarfile.open(source) as archive:
            return [name.partition("/")[2] for name in archive.getnames()]

    first = build("build_wheel")
    lists = {"goldfinch/papers.yaml", "goldfinch/alterations.yaml"}
    assert {"strategies/fdse.py", "goldfinch/py.typed", *lists} <= set(first)
    (wheel,) = (tmp_path / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in first if name.endswith("/METADATA")]
        described = archive.read(name).decode()
    assert "# Goldfinch" in described
    assert re.findall(r"\]\((?!https?:)", described) == [], "an index page has no other page of the checkout"
    (checkout / "strategies" / "fdse.py").unlink()
    assert set(first) - set(build("build_wheel")) == {"strategies/fdse.py"}
    found = build("build_sdist")
    assert {"requirements.txt", "CHANGELOG.md", "LICENSE", "conf/method/fpl.yaml"} <= set(found)
    assert [name for name in found if name.startswith("tests")] == []


# ---- pins ------------------------------------------------------------------------------------------------------------


def test_every_pin_is_exact_and_names_no_source() -> None:
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) and pin.url is None for pin in PINS)
    assert [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("-")] == []
    assert sorted(pin.name for pin in PINS) == [pin.name for pin in PINS]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_everything_declared_is_pinned_on_every_platform(platform: str) -> None:
    wanted = names(PROJECT["dependencies"])
    for extra in ("device", "server", "simulation", "tensorboard", "privacy", "export", "tune", "dev"):
        wanted |= names(EXTRAS[extra])
    pinned = {canonicalize_name(pin.name) for pin in pinned_on(platform)}
    assert wanted <= pinned
    cuda = {name for name in pinned if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert bool(cuda) == platform.startswith("linux")


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_pins_resolve_to_wheels_on_every_platform(platform: str, tmp_path: Path) -> None:
    """With uv, which Flower brings: pip evaluates markers for the machine it runs on and ignores --platform."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--only-binary", ":all:"]
    command += [word for name in SOURCE_ONLY for word in ("--no-binary", name)]
    command += [
        "--python-platform",
        PLATFORMS[platform][2],
        "--python-version",
        "3.11",
        "--target",
        str(tmp_path / "x"),
    ]
    certificates = ssl.get_default_verify_paths().cafile
    done = subprocess.run(
        [*command, "-r", str(ROOT / "requirements.txt")],
        env={
            "MACOSX_DEPLOYMENT_TARGET": "14.0",
            **({"SSL_CERT_FILE": certificates} if certificates else {}),
            **os.environ,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if "error sending request" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("\n + ") == len(pinned_on(platform))


# ---- declared = imported ---------------------------------------------------------------------------------------------

BROUGHT_BY = metadata.packages_distributions()
CALLED_OTHERWISE = {
    "mlflow": "mlflow-skinny",
    "wandb": "wandb",
    "timm": "timm",
    "pillow_heif": "pillow-heif",
    "pyarrow": "pyarrow",
}
"""Distributions of extras that are often not installed, by the module they bring."""

BROUGHT_ALONG = {"triton": "PyTorch brings it where it has kernels; common.losses asks whether it is there"}
NOT_IMPORTED = {
    "alembic": "MLflow's store in a file",
    "mkdocs-material": "make docs runs it",
    "mkdocstrings": "make docs runs it",
    "onnxscript": "torch.onnx.export writes with it",
    "tensorboard": "torch.utils.tensorboard writes with it",
}


def imported() -> Iterator[str]:
    """Every third-party module's name."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                found = [str(node.module)]
            for name in {item.partition(".")[0] for item in found}:
                if name not in sys.stdlib_module_names and name not in PACKAGES:
                    yield name


def distribution(module: str) -> str:
    known = BROUGHT_BY.get(module)
    return canonicalize_name(known[0] if known else CALLED_OTHERWISE[module])


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    used = {distribution(module) for module in imported() if module not in BROUGHT_ALONG}
    declared = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in EXTRAS if extra != "dev"))
    assert used <= declared, "add it to pyproject.toml"
    assert declared - used == set(NOT_IMPORTED), "remove it from pyproject.toml"


# ---- a device --------------------------------------------------------------------------------------------------------

TRAIN_ON_A_DEVICE = """
import sys
allowed = set({allowed!r})
from importlib import metadata
brought = metadata.packages_distributions()
class Installed:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        own = top in ("common", "strategies", "client", "server", "conf", "goldfinch")
        if top in brought and not own and not allowed & {{item.lower().replace("_", "-") for item in brought[top]}}:
            return None
        return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Installed(finder) for finder in sys.meta_path]
import client.app, client.resident.__main__
from client.node import answer_question
from client.resident.messages import Question
from goldfinch.cli import main
overrides = {overrides!r}
place = {{"domain": "a", "data-dir": {data!r}, "state-dir": {data!r} + "/../state"}}
reply = answer_question(Question("register", 1, {{"overrides": " ".join(overrides)}}, place))
assert reply.ok, reply.text
codes = [main(["run", "--quiet", *overrides])]
out = overrides[-2].partition("=")[2]
codes += [main(["export", out, "--to", out + "-model"]), main(["evaluate", out + "-model", {data!r}])]
print(*codes, main(["run", "--quiet", "data=glyphs", *overrides[4:]]))
"""


def brought_by(requirements: list[str]) -> set[str]:
    """All that the requirements bring with them, by the metadata of what is installed here."""
    found: set[str] = set()
    waiting = [Requirement(item) for item in requirements]
    while waiting:
        item = waiting.pop()
        name = canonicalize_name(item.name)
        key = f"{name}[{','.join(sorted(item.extras))}]"
        if key in found or (item.marker and not item.marker.evaluate({"extra": ""})):
            continue
        found |= {key, name}
        try:
            needs = metadata.requires(item.name) or []
        except metadata.PackageNotFoundError:
            continue
        for each in map(Requirement, needs):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in {"", *item.extras}):
                each.marker = None
                waiting.append(each)
    return {name for name in found if not name.endswith("]")}


@pytest.mark.long
def test_the_device_extra_trains_and_lacks_what_only_servers_need(tmp_path: Path) -> None:
    from PIL import Image

    allowed = brought_by([*PROJECT["dependencies"], *EXTRAS["device"]])
    assert not {"ray", "matplotlib", "scikit-learn", "scipy", "finch-clust", "pytest", "ruff", "mypy"} & allowed
    for domain in "ab":
        for place, colour in (("cat", 40), ("dog", 200)):
            folder = tmp_path / "data" / domain / place
            folder.mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (32, 32), (colour + number, number, ord(domain))).save(folder / f"{number}.png")
    overrides = ["data=folder", f"data.root={tmp_path / 'data'}", "data.domains=[a,b]", "data.classes=[cat,dog]"]
    overrides += [
        "method=fpl",
        "train.rounds=1",
        "train.device=cpu",
        "train.batch_size=4",
        f"output={tmp_path / 'out'}",
        "overwrite=true",
    ]
    code = TRAIN_ON_A_DEVICE.format(allowed=sorted(allowed), overrides=overrides, data=str(tmp_path / "data" / "a"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "GOLDFINCH_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0 0 0 1", done.stderr
    assert "[datasets]" in done.stderr
