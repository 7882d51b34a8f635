"""A term of a loss that trains nothing is an error; the page's own method trains as it says."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import run
from support.scripts import ROOT
from support.toy import toy_settings

from common.config import checked
from common.settings import with_method
from strategies.core.method import Batch, ClientContext, Losses
from strategies.fpl import FPL


@checked
class Halved(FPL):
    """FPL whose terms are scaled after they were computed, which leaves nothing of them to train on."""

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        terms = dict(super().loss(batch, local).terms)
        for name in terms.keys() - {"cross_entropy"}:
            terms[name] = terms[name] * 0.5
        return Losses(terms)


def test_a_term_without_a_gradient_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    settings = replace(toy_settings("fpl", tmp_path), method=Halved())
    with pytest.raises(Exception, match=r"Halved\.loss: the term contrast has no gradient.*dataclasses\.replace"):
        run(settings)


def test_the_method_of_the_first_paper_is_between_fedavg_and_fpl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"<<'END'\n(.*?)^END", (ROOT / "docs/first-paper.md").read_text(), re.DOTALL | re.MULTILINE)
    module = types.ModuleType("warm_fpl")
    monkeypatch.setitem(sys.modules, "warm_fpl", module)
    exec(compile(source, "first-paper.md", "exec"), module.__dict__)
    warm = module.WarmFPL
    base = toy_settings("fpl", tmp_path / "base", train={"rounds": 3})
    weights: dict[str, str] = {}
    for name, method in (("fpl", FPL()), ("at once", warm(warm_up=1)), ("slowly", warm(warm_up=100))):
        settings = replace(with_method(base, method), output=str(tmp_path / name))
        weights[name] = run(settings).sha256
    weights["fedavg"] = run(
        with_method(replace(base, output=str(tmp_path / "none")), FPL(contrast=0, consistency=0))
    ).sha256
    assert weights["at once"] == weights["fpl"]
    assert len(set(weights.values())) == 3
