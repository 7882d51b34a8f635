"""``goldfinch doctor``: what works on this machine, and how to fix what does not."""

import importlib.util
import os
import platform
import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

import httpx

from common.choices import CONF
from common.config import compose_config
from common.errors import ConfigError, EngineError, GoldfinchError
from common.settings import load_settings
from common.versions import package_versions, shadows

OK, WARN, FAIL = "ok", "note", "FAIL"
PINNED_FLOWER = "1.41"
PROGRAMS = ("flwr", "flower-superlink", "flower-supernode", "flower-superexec", "flwr-clientapp", "flwr-serverapp")
OPTIONAL = {"ray": "engine=ray", "triton": "CUDA kernels"}
"""Packages that only some runs need, and for what."""

REINSTALL = "make setup, or pip install -c requirements.txt in the checkout"

MAX_AHEAD, MAX_BEHIND = 5.0, 300.0
"""Largest differences in seconds between the clocks of a device and the SuperLink with which Flower accepts it."""

NODE_PORT = 9094
"""The port that a SuperNode listens on unless it is given ``--port``."""

RESOLUTION = 1.0
"""Seconds: HTTP's ``Date`` leaves fractions out."""


@dataclass(frozen=True)
class Finding:
    """One line of the report: the state of a subject, what was found, and how to fix it."""

    state: str
    subject: str
    found: str
    remedy: str = ""


def examine(server: str | None = None, authority: Path | None = None) -> int:
    """Print what works on this machine, or whether a device here can join the server at ``server``.

    Args:
        server: ``host:port`` of the SuperLink, or of the reverse proxy before it; ``None`` checks this machine.
        authority: certificate of the authority that the server's is verified with; ``None``: the server speaks no TLS.

    Returns:
        1 if something that every run needs does not work, else 0.

    Raises:
        ConfigError: a certificate is given without a server.
    """
    if server:
        return _report(list(_server(server, authority)), "a device may join from here")
    if server is not None or authority is not None:
        raise ConfigError("goldfinch doctor checks a server with --server HOST:PORT --ca FILE, this machine without")
    findings: list[Finding] = []
    for check in CHECKS:
        findings += check()
    return _report(findings, "everything a run needs is here")


def _server(server: str, authority: Path | None) -> Iterator[Finding]:
    """Check the connection to the server, its certificate and its clock."""
    try:
        ahead = clock_difference(server, authority)
    except EngineError as error:
        yield Finding(FAIL, "server", str(error), "docs/deploy.md, 'What a message means'")
        return
    certificate = "without TLS"
    if authority:
        certificate = "its certificate is good"
    yield Finding(OK, "server", f"{server} answers, {certificate}")
    wrong = what_is_wrong(ahead)
    if wrong:
        yield Finding(FAIL, "clock", wrong, "set the clock of the one that is wrong, by NTP on both: timedatectl")
    else:
        yield Finding(OK, "clock", f"within {max(1.0, abs(ahead)):.0f} s of the server's")


def _report(findings: Sequence[Finding], all_well: str) -> int:
    failed = 0
    for finding in findings:
        failed += finding.state == FAIL
        print(f"{finding.state:>4}  {finding.subject:18} {finding.found}")
        if finding.remedy:
            print(f"{'':26}-> {finding.remedy}")
    if not failed:
        print(f"\n{all_well}")
        return 0
    print(f"\n{failed} problem{'s' * (failed > 1)}")
    return 1


def _versions() -> Iterator[Finding]:
    versions = package_versions()
    yield Finding(OK, "python", f"{versions['python']} on {platform.system()} {platform.machine()}")
    for name in ("torch", "torchvision", "flwr", "ray", "hydra-core", "finch-clust", "safetensors", "numpy", "triton"):
        if name in versions:
            yield Finding(OK, name, versions[name])
        elif name in OPTIONAL:
            yield Finding(WARN, name, "not installed", f"needed for {OPTIONAL[name]}")
        else:
            yield Finding(FAIL, name, "not installed", REINSTALL)
    flower = versions.get("flwr", "")
    if flower and not flower.startswith(PINNED_FLOWER + "."):
        remedy = f"every machine of a federation needs flwr {PINNED_FLOWER}: install requirements.txt"
        yield Finding(FAIL, "flwr version", f"{flower}, tested with {PINNED_FLOWER}", remedy)


def _compute() -> Iterator[Finding]:
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    yield Finding(OK, "cpu", f"{os.cpu_count()} CPUs, OMP_NUM_THREADS {threads}; a client uses train.threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield Finding(OK, f"cuda:{index}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    elif Path("/dev/nvidiactl").exists():
        built = torch.version.cuda or "no CUDA"
        remedy = "compare the driver's CUDA version (nvidia-smi) with torch's; in a container pass --gpus all"
        yield Finding(WARN, "cuda", f"a driver is here, but torch (built for {built}) sees no device", remedy)
    else:
        yield Finding(OK, "cuda", "no GPU; clients train on the CPU")


def _flower_programs() -> Iterator[Finding]:
    here = Path(sys.executable).parent
    for name in PROGRAMS:
        if not (here / name).exists():
            yield Finding(FAIL, name, f"not next to {sys.executable}", REINSTALL)
    found = shutil.which("flower-superlink")
    if found is None or Path(found).resolve().parent != here.resolve():
        remedy = f"Flower starts its programs by bare name: source {here / 'activate'} before a plain flwr run"
        yield Finding(WARN, "PATH", f"flower-superlink is {found or 'not on the PATH'}", remedy)
    else:
        yield Finding(OK, "PATH", f"Flower's programs are {here}'s")
    if os.environ.get("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION") == "1":
        yield Finding(OK, "flwr run", "will not install dependencies at run time")
    else:
        found = "a SuperLink started by plain `flwr run` would install all dependencies for every run"
        remedy = "export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 before it (goldfinch run does)"
        yield Finding(WARN, "flwr run", found, remedy)


def _local_superlink() -> Iterator[Finding]:
    """Look for a SuperLink of an earlier ``flwr run``, which still imports code from the folder it was started in."""
    port = os.environ.get("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "39091")
    try:
        up = httpx.get(f"http://127.0.0.1:{port}/health", timeout=1.0).is_success
    except httpx.HTTPError:
        up = False
    if up:
        found = "Flower's local SuperLink is running; simulations import code from where it was started"
        remedy = "if that is another checkout, stop it: pkill -TERM -f 'flower-superlink --insecure --simulation'"
        yield Finding(WARN, f"port {port}", found, remedy)
    else:
        yield Finding(OK, f"port {port}", "no local SuperLink of an earlier flwr run")


def _node_port() -> Iterator[Finding]:
    """A SuperNode serves its own health and processes on a port, by default always the same one."""
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", NODE_PORT)) == 0
    if taken:
        found = "taken, so a SuperNode that is started here without --port ends at once"
        yield Finding(WARN, f"port {NODE_PORT}", found, "give every further SuperNode of a machine its own --port")
    else:
        yield Finding(OK, f"port {NODE_PORT}", "free for a SuperNode")


def _shadows() -> Iterator[Finding]:
    """Look for files here with the names of Goldfinch's packages; ``goldfinch`` itself does not import from here."""
    paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for stranger in shadows(paths):
        found = f"python -c, python -m and a SuperLink started here import {stranger} in place of Goldfinch's package"
        yield Finding(WARN, "this folder", found, "rename it, or work in another folder")


def _memory() -> Iterator[Finding]:
    shared, disk = Path("/dev", "shm"), shutil.disk_usage(Path.cwd())  # Ray's object store lives there
    if shared.exists():
        size = shutil.disk_usage(shared).total / 2**30
        if size >= 1:
            yield Finding(OK, str(shared), f"{size:.1f} GiB")
        else:
            yield Finding(WARN, str(shared), f"{size:.1f} GiB", "docker: --shm-size=2g, or engine=inline")
    free = disk.free / 2**30
    if free > 2:
        yield Finding(OK, "disk", f"{free:.1f} GiB free here")
    else:
        yield Finding(WARN, "disk", f"{free:.1f} GiB free here", "runs keep checkpoints")
    if hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        yield Finding(OK, "memory", f"{total:.1f} GiB; a Ray actor with torch takes about 0.9 GiB")


def _data() -> Iterator[Finding]:
    root = os.environ.get("GOLDFINCH_DATA")
    yield Finding(OK, "GOLDFINCH_DATA", root or "unset; data sets other than glyphs need it or data.root=FOLDER")
    for path in sorted((CONF / "data").glob("*.yaml")):
        try:
            source = load_settings([f"data={path.stem}"]).data
            if path.stem != "glyphs" and not (root or source.root):
                yield Finding(WARN, path.stem, "no folder given", "set GOLDFINCH_DATA or data.root")
                continue
            domain = source.load(source.domains[0])
            yield Finding(OK, path.stem, f"{domain.name}: {len(domain.train)} train, {len(domain.test)} test")
        except GoldfinchError as error:
            state = WARN
            if path.stem == "glyphs":  # which needs no files
                state = FAIL
            yield Finding(state, path.stem, "cannot be used", str(error).splitlines()[0])


def _configuration() -> Iterator[Finding]:
    try:
        methods = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
        for method in methods:
            compose_config([f"method={method}"])
        yield Finding(OK, "configuration", f"{len(methods)} methods")
    except GoldfinchError as error:
        yield Finding(FAIL, "configuration", str(error), "reinstall Goldfinch")
    if importlib.util.find_spec("client.app") is None:
        yield Finding(FAIL, "client.app", "cannot be imported", "python -m pip install -e . --no-deps")


def clock_difference(server: str, authority: Path | None, now: Callable[[], datetime] | None = None) -> float:
    """Return the seconds by which this machine's clock is ahead of the server's, to about a second.

    Args:
        server: ``host:port`` of the SuperLink, or of the proxy before it.
        authority: certificate of the authority that the server's is verified with; ``None``: the server speaks no TLS.
        now: this machine's time.

    Raises:
        EngineError: the server cannot be reached, is no SuperLink, or its reply has no time.
    """
    now = now or partial(datetime.now, UTC)
    verify: ssl.SSLContext | bool = True
    if authority is not None:
        try:
            verify = ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise EngineError(f"--ca {authority}: no certificate can be read from there ({error})") from error
    url = f"{'https' if authority else 'http'}://{server}/health"
    try:
        before = now()
        response = httpx.get(url, timeout=20.0, verify=verify)
        after = now()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        clock = f"; this machine's clock says {now():%Y-%m-%d %H:%M} UTC" if "CERTIFICATE_VERIFY" in str(error) else ""
        raise EngineError(f"{url}: {error}{clock}") from error
    if not response.is_success:
        raise EngineError(f"{url} answers {response.status_code}: is this the SuperLink or its proxy?")
    try:
        theirs = parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError) as error:
        raise EngineError(f"{url} does not say what time it is") from error
    return (before + (after - before) / 2 - theirs).total_seconds() - RESOLUTION / 2


def what_is_wrong(ahead: float) -> str | None:
    """Return why Flower refuses a device whose clock is ``ahead`` seconds ahead of the server's; ``None`` if not."""
    if -MAX_BEHIND <= ahead <= MAX_AHEAD:
        return None
    difference = f"{-ahead:,.0f} s behind"
    if ahead > 0:
        difference = f"{ahead:,.0f} s ahead of"
    limits = f"more than {MAX_AHEAD:g} s ahead or {MAX_BEHIND:g} s behind"
    return f"{difference} the server's clock; the server turns away devices {limits}"


CHECKS = (_versions, _compute, _flower_programs, _local_superlink, _node_port, _shadows, _memory, _configuration, _data)
