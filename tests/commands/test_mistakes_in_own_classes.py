"""Mistakes in a class of one's own: what the page's class becomes by one wrong line, and what the run says of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.own import forget

from goldfinch.cli import main

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
TINY = ["data=glyphs", "train.device=cpu", "train.rounds=2", "train.local_steps=1", "rounds.test_samples=8", "--quiet"]
SUPER = "    def aggregate(self, state, updates, server):\n        new = super().aggregate(state, updates, server)\n"
UPLOAD = (
    "    def upload(self, local, trained):\n        from strategies.core.exchange import Upload\n"
    "        return Upload(prototypes=trained.prototypes, "
)
OF_A_NUMBER = r"ownlib/mine.py\", line \d+, in upload\n.*Upload: a is a int; make it a dense tensor of int64, float64"
OF_ONE = r"and must be tuple\[\w+, \.\.\.\]; a tuple of one is written \(it,\)"
EXPECTS = (
    "    def expects(self, server):\n        import torch\n        from strategies.core.exchange import UploadSpec\n"
    "        return UploadSpec(prototypes=True, "
)
PHASES = "    def phases(self, epochs):\n        from strategies.core.exchange import Phase\n"


def page_class(page: str) -> str:
    """Return the first block of Python of a page, which is a whole module."""
    text = (DOCS / f"add-a-{page}.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package ``ownlib`` in the working directory, on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ownlib").mkdir()
    yield tmp_path / "ownlib"
    forget("ownlib")


def said(package: Path, page: str, old: str, new: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a run with the page's class says that has ``new`` in the place of ``old``; the run must fail."""
    source = page_class(page)
    assert old in source
    (package / "mine.py").write_text(source.replace(old, new))
    assert main(["run", *TINY, "output=run", *words]) == 1
    return capsys.readouterr().err


METHODS: Mapping[str, tuple[str, str, str]] = {
    "no property": ("    @property\n", "", "prototypes_from is a function, and a property of Method: write @property"),
    "misspelt property": ("def prototypes_from", "def prototypes_form", "override both prototypes_from and"),
    "unknown prototypes": (
        '"last_epoch_running"',
        '"last_epoch"',
        r"prototypes_from is 'last_epoch'; did you mean 'last_epoch_running'\? .*own",
    ),
    "prototypes not sent": ('"last_epoch_running"', '"own"', "the prototype set is missing"),
    "prototypes not averaged": ("def aggregate_prototypes", "def prototypes", "override both prototypes_from and"),
    "no return of prototypes": (
        "        return server.aggregation.class_means(",
        "        server.aggregation.class_means(",
        "aggregate_prototypes returns nothing, and that of Method",
    ),
    "no losses": ("return Losses(terms)", "return terms", r"loss\(\) is a dict, and must be Losses"),
    "no return of losses": ("return Losses(terms)", "Losses(terms)", "WarmContrast.loss returns nothing"),
    "a number among losses": (
        "return Losses(terms)",
        "return Losses({**terms, 'b': 0.5})",
        r"WarmContrast.loss\(\).terms\['b'\] is 0.5, and must be Tensor",
    ),
    "a loss for each image": (
        "return Losses(terms)",
        "return Losses({**terms, 'b': batch.logits.sum(1)})",
        r"WarmContrast.loss: the term b is a Tensor \[16\], and must be a tensor of one element",
    ),
    "a detached loss": (
        "return Losses(terms)",
        "return Losses({**terms, 'b': batch.logits.detach().mean()})",
        "the term b has no gradient",
    ),
    "another state": (
        "    @property",
        f"{SUPER}        return vars(new)\n\n    @property",
        r"aggregate\(\) is a dict, and must be GlobalState",
    ),
    "a state of lists": (
        "    @property",
        f"{SUPER}        return GlobalState(new.weights, extra={{'a': [1.0]}}, round=new.round)\n\n    @property",
        r"GlobalState: a is a list; make it a dense tensor of int64, .*ownlib/mine.py, line \d+\)",
    ),
    "a state of complex numbers": (
        "    @property",
        f"{SUPER}        extra = {{'a': new.weights['head.bias'] * 1j}}\n"
        "        return GlobalState(new.weights, new.prototypes, extra, round=new.round)\n\n    @property",
        r"GlobalState: a is a Tensor of torch.complex64, torch.strided; make it .*ownlib/mine.py, line \d+\)",
    ),
    "another first state": (
        "    @property",
        "    def initial_state(self, weights, server):\n        return weights\n\n    @property",
        r"initial_state\(\) is a dict, and must be GlobalState",
    ),
    "another download": (
        "    @property",
        "    def download(self, state, server):\n        return {'weights': state.weights}\n\n    @property",
        r"download\(\) is a dict, and must be Download",
    ),
    "another declaration": (
        "    @property",
        "    def expects(self, server):\n        return {'prototypes': True}\n\n    @property",
        r"expects\(\) is a dict, and must be UploadSpec",
    ),
    "another upload": (
        "    @property",
        "    def upload(self, local, trained):\n        return {'prototypes': trained.prototypes}\n\n    @property",
        r"upload\(\) is a dict, and must be Upload",
    ),
    "a number that is kept": ("    @property", f"{UPLOAD}local={{'a': 3}})\n\n    @property", OF_A_NUMBER),
    "a number that is sent": ("    @property", f"{UPLOAD}extra={{'a': 3}})\n\n    @property", OF_A_NUMBER),
    "vectors in the place of prototypes": (
        "    @property",
        f"{UPLOAD.replace('trained.prototypes', 'trained.prototypes.vectors')})\n\n    @property",
        "Upload: prototypes is a Tensor, and must be a PrototypeSet",
    ),
    "an extra tensor that is not declared": (
        "    @property",
        "    def upload(self, local, trained):\n        from strategies.core.exchange import Upload\n"
        "        return Upload(prototypes=trained.prototypes, extra={'seen': local.class_count * local.weights["
        "'head.bias']})\n\n    @property",
        r"extra, as the method's expects declares it: missing \[\], not asked for \['seen'\]",
    ),
    "predictions of no export": (
        "    @property",
        "    def predict(self, features, logits, local):\n        return -logits\n\n    @property",
        "override inference, too: an export",
    ),
    "a scored part that each client keeps": (
        "    @property",
        "    def shared_names(self, model):\n"
        "        return {name for name in model.state_dict() if name != 'head.bias'}\n\n    @property",
        "shared_names leaves head.bias on each client.*let personal return True",
    ),
    "an adaptation that nobody calls": (
        "    @property",
        "    def adapt(self, local):\n        local.model.zero_grad()\n\n    @property",
        "override adapts, too",
    ),
    "weights that nobody scores": (
        "    @property",
        "    def scored_weights(self, state):\n        return {**state.weights}\n\n    @property",
        "override adapt or download, too",
    ),
    "an answer to no exchange": (
        "    @property",
        "    def respond(self, local):\n        return self.upload(local, None)\n\n    @property",
        "override exchanges, too",
    ),
    "a pass of no export": (
        "    @property",
        "    def compute(self, model, images, local):\n        features, logits = model(images)\n"
        "        return features, -logits, {}\n\n    @property",
        "compute gives other features or logits than the network: override inference, too: an export",
    ),
    "received tensors changed": (
        "        return Losses(terms)",
        "        local.prototypes.vectors.mul_(0.9)\n        return Losses(terms)",
        r"changed received tensors in place \(prototypes.vectors\)",
    ),
    "infinite loss": (
        "return Losses(terms)",
        "return Losses({'b': batch.cross_entropy() * float('nan')})",
        "the loss b is nan: .*lower train.learning_rate.*0 / 0",
    ),
    "a mean of nothing that is sent": (
        "    @property",
        "    def expects(self, server):\n        import torch\n        from strategies.core.method import UploadSpec\n"
        "        return UploadSpec(prototypes=True, extra={'a': (torch.float32, ())})\n\n"
        f"{UPLOAD}extra={{'a': local.weights['head.bias'][:0].mean()}})\n\n    @property",
        r"a has (1 of 1 )?values that are not finite: .*0 / 0",
    ),
    "a mean of nothing in the state": (
        "    @property",
        f"{SUPER}        extra = {{'a': new.weights['head.bias'][:0].mean()}}\n"
        "        return GlobalState(new.weights, new.prototypes, extra, round=new.round)\n\n    @property",
        "has values in extra/a that are not finite, made of finite replies: .*0 / 0",
    ),
    "two infinite losses": (
        "return Losses(terms)",
        "a = batch.cross_entropy()\n        return Losses({'b': a * float('nan'), 'c': a * float('inf')})",
        "the loss b is nan and c is inf: .*lower train.learning_rate",
    ),
    "no return of a state": ("    @property", f"{SUPER}\n    @property", "WarmContrast.aggregate returns nothing"),
    "one exchange": ("    @property", "    exchanges = 'train'\n\n    @property", f"exchanges is 'train', {OF_ONE}"),
    "no such exchange": (
        "    @property",
        "    @property\n    def scored_at(self):\n        return 'trian'\n\n    @property",
        "scored_at is 'trian', none of its exchanges; did you mean 'train'",
    ),
    "a class's value as a field": (
        "    @property",
        "    averages: bool = False\n\n    @property",
        r"averages is a field, .* write averages: ClassVar\[",
    ),
    "a word for no": ("    @property", "    averages = 'no'\n\n    @property", "averages is 'no', and must be bool"),
    "a property for a function": (
        "    def loss",
        "    @property\n    def loss",
        "loss is a property, and a function of Method: leave out @property",
    ),
    "an argument less": (
        "batch: Batch, local: ClientContext)",
        "batch: Batch)",
        r"WarmContrast.loss: too many positional arguments; that of Method has \(self, batch, local\)",
    ),
    "one phase": (
        "    @property",
        f"{PHASES}        return Phase(epochs)\n\n    @property",
        rf"phases\(\) is a Phase, {OF_ONE}",
    ),
    "names for a function": (
        "    @property",
        f"{PHASES}        return (Phase(epochs, 'head'),)\n\n    @property",
        r"phases\(\)\[0\].trainable is 'head', and must be Callable",
    ),
    "a word for a number of rows": (
        "    @property",
        f"{EXPECTS}max_rows='3')\n\n    @property",
        r"expects\(\).max_rows is '3', and must be int \| None",
    ),
    "a length for a shape": (
        "    @property",
        f"{EXPECTS}extra={{'a': (torch.float32, 3)}})\n\n    @property",
        r"expects\(\).extra\['a'\]\[1\] is 3, and must be tuple\[.*\(it,\)",
    ),
    "a shape without a dtype": (
        "    @property",
        f"{EXPECTS}extra={{'a': (3,)}})\n\n    @property",
        r"expects\(\).extra\['a'\] is a tuple, and must be tuple\[dtype",
    ),
    "a list of losses": (
        "return Losses(terms)",
        "return Losses(list(terms.values()))",
        r"loss\(\).terms is a list, and must be dict\[str, Tensor\]",
    ),
    "losses without a term": ("return Losses(terms)", "return Losses({})", "loss gave no term, so nothing would train"),
    "a list of prototypes": (
        "return server.aggregation.class_means([update.prototypes for update in updates])",
        "return [update.prototypes for update in updates]",
        r"aggregate_prototypes\(\) is a list, and must be PrototypeSet",
    ),
    "other dtypes": (
        "    @property",
        f"{SUPER}        weights = {{name: tensor.double() for name, tensor in new.weights.items()}}\n"
        "        return GlobalState(weights, new.prototypes, round=new.round)\n\n    @property",
        "returned weights of other names, dtypes or shapes",
    ),
    "no return of an average": (
        "    @property",
        "    def average(self, *_):\n        pass\n\n    @property",
        "WarmContrast.average returns nothing",
    ),
    "no return of a download": (
        "    @property",
        "    def download(self, *_):\n        pass\n\n    @property",
        "WarmContrast.download returns nothing",
    ),
    "no return of an upload": (
        "    @property",
        "    def upload(self, *_):\n        pass\n\n    @property",
        "WarmContrast.upload returns nothing",
    ),
    "unknown tensors": (
        "    @property",
        "    def shared_names(self, model):\n        return {'body.weight'}\n\n    @property",
        "shared_names: the network has no body.weight",
    ),
    "unknown parameters": (
        "    @property",
        f"{PHASES}        return (Phase(epochs, lambda name: name.startswith('body')),)\n\n    @property",
        "nothing to train in phase 1 of a round: give it epochs, and names",
    ),
    "no epochs": (
        "    @property",
        f"{PHASES}        return (Phase(0),)\n\n    @property",
        "nothing to train in phase 1 of a round: give it epochs",
    ),
    "classes in the place of scores": (
        "    @property",
        "    def predict(self, features, logits, local):\n        return logits.argmax(1)\n\n"
        "    def inference(self, model, prototypes, seed):\n        return model\n\n    @property",
        r"logits \[8, 10\], scores \[8\]: must be \[N, 10\]",
    ),
    "another decorator": (
        "@checked\n",
        "import dataclasses\n\n\n@dataclasses.dataclass\n",
        r"cannot inherit non-frozen .*ownlib/mine.py, line \d+\); correct it there",
    ),
    "syntax": ("terms = {", "terms = {{", "was never closed .*mine.py, line"),
}


@pytest.mark.parametrize("mistake", METHODS)
def test_a_mistake_in_a_method_is_named(mistake: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, reason = METHODS[mistake]
    words = ["method=ownlib.mine.WarmContrast", "protocol.samples=16", "data.domains=[sketch,signs]"]
    assert re.search(reason, said(package, "method", old, new, words, capsys), re.DOTALL)


PROTOCOLS: Mapping[str, tuple[str, str, str]] = {
    "client twice": ("ClientSpec(domain, index)", "ClientSpec(domain, 0)", "ByLabel.clients has sketch-0 twice"),
    "no client": ("return tuple(", "return () and tuple(", "ByLabel.clients is empty"),
    "names of clients": (
        "ClientSpec(domain, index)",
        "f'{domain}-{index}'",
        r"clients\(\)\[0\] is 'sketch-0', and must be ClientSpec",
    ),
    "domain and number exchanged": (
        "ClientSpec(domain, index)",
        "ClientSpec(index, domain)",
        r"clients\(\)\[0\].domain is 0, and must be str",
    ),
    "not ascending": (".sort().values", ".flip(0)", r"split of sketch-0 must be an int64 tensor \[n\] of distinct"),
    "not distinct": ("return mine[: self.samples].sort()", "return mine[: 2].repeat(2).sort()", "of distinct, asc"),
    "no tensor": (".sort().values", ".tolist()", r"ByLabel.split\(\) is a list, and must be Tensor"),
    "beyond the images": (".sort().values", ".sort().values + 9999", "from 0 to 239, of the training images of sk"),
    "misspelt": ("def split", "def splits", "ByLabel does not define split"),
    "unknown domain": (
        "    def split",
        "    def test_domains(self, data):\n        return ('nowhere',)\n\n    def split",
        "test_domains has 'nowhere', no domain",
    ),
    **{
        f"scored domains {found}": (
            "    def split",
            f"    def test_domains(self, data):\n        return {found}\n\n    def split",
            rf"ByLabel.test_domains\(\)\S* is {said}",
        )
        for found, said in (
            ("3", r"3, and must be tuple\[str, \.\.\.\]"),
            ("(0,)", "0, and must be str"),
            ("'sketch'", f"'sketch', {OF_ONE}"),
        )
    },
    "no scored domain": (
        "    def split",
        "    def test_domains(self, data):\n        return ()\n\n    def split",
        "ByLabel.test_domains is empty",
    ),
    "no test image": (
        "    def split",
        "    def test_split(self, domain):\n        return domain.test.subset(domain.test.labels[:0])\n\n    def split",
        "ByLabel.test_split returned no image of sketch, which has",
    ),
    "no split to score": (
        "    def split",
        "    def test_split(self, domain):\n        return domain.test.images, domain.test.labels\n\n    def split",
        r"ByLabel.test_split\(\) is a tuple, and must be Split",
    ),
}


@pytest.mark.parametrize("mistake", PROTOCOLS)
def test_a_mistake_in_a_protocol_is_named_before_training(
    mistake: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, reason = PROTOCOLS[mistake]
    words = ["method=fedavg", "protocol=ownlib.mine.ByLabel", "data.domains=[sketch]"]
    assert re.search(reason, said(package, "protocol", old, new, words, capsys), re.DOTALL)
    assert not Path("run", "scores.jsonl").exists() or not Path("run", "scores.jsonl").read_text()


MODELS: Mapping[str, tuple[str, str, str]] = {
    "outputs": (
        "nn.Linear(self.width, class_count)",
        "nn.Linear(self.width, class_count + 1)",
        r"logits of two images are \[2, 11\], and must be \[2, 10\]",
    ),
    "two outputs": (
        "nn.Linear(self.width, class_count)",
        "nn.LSTM(self.width, class_count)",
        r"logits of two images are tuple, and must be \[2, 10\]",
    ),
    "another class": (
        "return Model(",
        "return nn.Sequential(nn.ReLU()) or Model(",
        r"_construct\(\) is a Sequential, and must be Model",
    ),
    "no return": ("return Model(", "Model(", "_construct returns nothing"),
    "features": ("self.width, class_count)\n", "9, class_count)\n", r"features .* are \[2, 96\], and must be \[2, 9\]"),
    "a word for a number": (
        "ClassVar[int] = 8",
        "ClassVar[int] = '8'",
        "Wide.minimum_image_size is '8', and must be int",
    ),
    "head": (
        "nn.Linear(self.width, class_count)",
        "nn.Linear(9, class_count)",
        r"fails on images \[2, 3, 32, 32\]",
    ),
    "misspelt": (
        "def _construct",
        "def construct",
        "Wide does not define _construct",
    ),
}


@pytest.mark.parametrize("mistake", MODELS)
def test_a_mistake_in_a_network_is_named(mistake: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, reason = MODELS[mistake]
    words = ["method=fedavg", "model=ownlib.mine.Wide", "protocol.samples=16", "data.domains=[sketch]"]
    assert re.search(reason, said(package, "model", old, new, words, capsys), re.DOTALL)
    assert not Path("run", "scores.jsonl").exists() or not Path("run", "scores.jsonl").read_text()


def test_a_network_that_states_no_smallest_image_takes_any(package: Path) -> None:
    line = "    minimum_image_size: ClassVar[int] = 8\n"
    source = page_class("model")
    assert line in source
    (package / "mine.py").write_text(source.replace(line, ""))
    words = ["method=fpl", "model=ownlib.mine.Wide", "protocol.samples=16", "data.domains=[sketch,signs]"]
    assert main(["run", *TINY, "output=run", *words]) == 0


@pytest.mark.parametrize(("hook", "misspelt"), [("loss", "losses"), ("shared_names", "shared_name")])
def test_a_misspelt_hook_is_said(
    hook: str, misspelt: str, package: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    inserted = f"    def {misspelt}(self, *_):\n        return self\n\n    @property"
    source = page_class("method").replace("    @property", inserted, 1).replace("def loss(", "def _unused(")
    (package / "mine.py").write_text(source)
    assert main(["run", "--dry-run", *TINY, "method=ownlib.mine.WarmContrast", "output=run"]) == 0
    said = caplog.text + capsys.readouterr().err
    assert f"WarmContrast.{misspelt} overrides nothing; did you mean {hook}?" in said


@pytest.mark.long
def test_nothing_is_said_of_the_classes_of_goldfinch() -> None:
    """Imports of all modules, in a process of their own."""
    command = (
        "import pkgutil, importlib, common, strategies\n"
        "for package in (common, strategies):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert "overrides nothing" not in ended.stderr


def test_a_default_of_the_wrong_type_is_named(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method=ownlib.mine.WarmContrast"]
    error = said(package, "method", "warm_up: Count = 5", "warm_up: Count = 'many'", words, capsys)
    assert "method.warm_up='many': must be a valid integer" in error


def test_a_mistake_in_a_data_set_is_named(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.findall(r"```python\n(.*?)```", (DOCS / "add-a-data-set.md").read_text(), re.DOTALL)[1], {})
    words = ["method=fedavg", "data=ownlib.mine.Archives", "data.root=.", "data.domains=[day]", "data.image_size=16"]
    error = said(package, "data-set", "return Domain(", "return (", words, capsys)
    assert "Archives._read() is a tuple, and must be Domain" in error
    forget("ownlib")
    error = said(package, "data-set", "labels[:cut]", "labels[:cut + 1]", words, capsys)
    assert "archives: domain 'day': 48 images need as many labels" in error
    forget("ownlib")
    error = said(package, "data-set", '    name: ClassVar[str] = "archives"\n', "", words, capsys)
    assert 'Archives has no name; write name: ClassVar[str] = "' in error
    forget("ownlib")
    error = said(package, "data-set", "return Domain(domain,", "return Domain('dusk',", words, capsys)
    assert "domain 'day' was read as Domain('dusk', ...)" in error
    forget("ownlib")
    error = said(package, "data-set", "labels[cut:]))", "labels[cut:]), train_groups=('one',))", words, capsys)
    assert "train_groups must have an entry for each of 48 images; got 1" in error
    forget("ownlib")
    error = said(package, "data-set", "return self.classes", "return ('cat', 'cat')", words, capsys)
    assert "names must be texts, and no two alike" in error
    for old, new, reason in (
        ("return self.classes", "self.classes", "class_names is None, and must be tuple[str, ...]"),
        ("return self.classes", "return (1, 2)", "class_names[0] is 1, and must be str"),
        ("return self.classes", "return list(self.classes)", "class_names is a list, and must be tuple[str, ...]"),
        (
            "name: ClassVar[str]",
            "name: str",
            "Archives.name is a field, and no setting of DataSource: write name: Class",
        ),
        ("Split(images[:cut], labels[:cut])", "images[:cut]", "Archives._read().train is a Tensor, and must be Split"),
    ):
        forget("ownlib")
        assert reason in said(package, "data-set", old, new, words, capsys)
    forget("ownlib")
    assert "_read returns nothing, and that of" in said(package, "data-set", "return Domain(", "Domain(", words, capsys)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method=ownlib.mine"], r"ownlib.mine is a module; add the name of its class: ownlib.mine.NAME; .*WarmContr"),
        (["method=ownlib.Mine"], r"ownlib \(.*ownlib\) has no class Mine"),
        (["method=ownlib/mine.py"], r"write its dotted name: method=ownlib.mine.NAME"),
        (["method=fpl.yaml"], "method=fpl.yaml: no such choice; did you mean 'fpl"),
        (["data=./photos"], r"a folder of images is data=folder .*data.root='./photos'"),
        (["data=photos.csv"], "data=table .*data.path='photos.csv'"),
        (["--config-dir", "nowhere"], "no such folder in .*; give one that is laid out as conf/"),
    ],
    ids=["module", "namespace", "path", "yaml", "images", "table", "folder"],
)
def test_a_name_that_is_no_class_gets_the_remedy(
    words: list[str], reason: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "mine.py").write_text(page_class("method"))
    assert main(["run", *TINY, "output=run", *words]) == 1
    assert re.search(reason, capsys.readouterr().err)
