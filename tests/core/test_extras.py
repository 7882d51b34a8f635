"""What is printed for a library that is not installed works from where Goldfinch was installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from common import extras
from common.errors import ConfigError
from common.extras import EXTRA_OF, install_command, libraries_of, missing_library
from server.flower.submit import write_bundle

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_a_checkout_is_installed_again_with_the_extra_and_the_pins() -> None:
    words = shlex.split(install_command("datasets"))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert words[4:] == ["-c", str(ROOT / "requirements.txt"), "-e", f"{ROOT}[datasets]"]


def test_the_code_that_a_run_brings_to_a_device_is_not_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "app")
    monkeypatch.setattr(extras, "HERE", tmp_path / "app")
    origin = {"url": (tmp_path / "checkout").as_uri(), "dir_info": {"editable": True}}
    monkeypatch.setattr(extras, "_origin", lambda: origin)
    assert str(tmp_path) not in install_command("datasets"), "neither is a checkout"
    (tmp_path / "checkout").mkdir()
    for name in ("pyproject.toml", "requirements.txt"):
        (tmp_path / "checkout" / name).touch()
    pins, flag, what = shlex.split(install_command("datasets"))[5:]
    assert (pins, flag) == (str(tmp_path / "checkout" / "requirements.txt"), "-e")
    assert what == f"{tmp_path / 'checkout'}[datasets]"


def test_an_installed_wheel_names_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_installed_from", lambda: None)
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda _: [
            'goldfinch-fl[clustering,datasets]; extra == "server"',
            'jinja2>=3.1; extra == "server"',
            'finch-clust<0.3,>=0.2.3; extra == "clustering"',
            'scipy>=1.11; extra == "datasets"',
            'ray; extra == "simulation"',
        ],
    )
    words = shlex.split(install_command("server"))
    assert sorted(words[4:]) == ["finch-clust<0.3,>=0.2.3", "jinja2>=3.1", "scipy>=1.11"]


def test_every_extra_of_a_library_is_declared() -> None:
    assert set(EXTRA_OF.values()) <= set(DECLARED)


@pytest.mark.parametrize("module", sorted(EXTRA_OF))
def test_a_missing_library_is_named_with_its_extra(module: str) -> None:
    message = missing_library(ModuleNotFoundError(name=f"{module}.part"))
    assert message is not None
    assert module in message
    assert "pip install" in message


def test_a_missing_module_of_the_user_s_own_gets_no_advice_on_extras() -> None:
    assert missing_library(ModuleNotFoundError(name="my_method")) is None


def test_a_feature_that_lacks_its_library_says_which_extra_has_it() -> None:
    with pytest.raises(ConfigError, match=r"this needs no_such_library: .*\[tune\]"), libraries_of("tune", "this"):
        import no_such_library  # noqa: F401


@pytest.mark.parametrize("name", ["finch.py", "finch/__init__.py"])
def test_a_file_of_the_user_s_that_has_a_library_s_name_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in [each for each in sys.modules if each.partition(".")[0] == "finch"]:
        monkeypatch.delitem(sys.modules, module)
    place = tmp_path / Path(name).parts[0]
    try:
        with pytest.raises(ConfigError) as raised, libraries_of("clustering", "this"):
            importlib.import_module("finch.finch")
        assert f"this needs finch, and {place} has its name and is found first; rename it: mv" in str(raised.value)
    finally:
        sys.modules.pop("finch", None)


def test_a_library_of_one_s_own_is_installed_by_its_name() -> None:
    assert shlex.split(install_command("mylibrary"))[1:] == ["-m", "pip", "install", "mylibrary"]
