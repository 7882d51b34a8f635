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
REINSTALL = "make setup, or pip install -c requirements.txt in the checkout"

MAX_AHEAD, MAX_BEHIND = 5.0, 300.0
"""Seconds by which Flower lets a device's clock differ from the SuperLink's; beyond, it turns the device away."""

NODE_PORT = 9094
"""The port that a SuperNode listens on unless it is given ``--port``."""

RESOLUTION = 1.0
"""Seconds: HTTP's ``Date`` leaves fractions out."""


@dataclass(frozen=True)
class Finding:
    """One line of the report: state, what was looked at, what was found, and how to fix it."""

    state: str
    subject: str
    found: str
    remedy: str = ""


def examine(entrance: str | None = None, authority: Path | None = None) -> int:
    """Print what works on this machine, or how the server at ``entrance`` looks to a device here.

    Args:
        entrance: ``host:port`` of the SuperLink, or of the reverse proxy before it; ``None`` checks this machine.
        authority: certificate of the authority that the server's is verified with; ``None``: the server speaks no TLS.

    Returns:
        1 if something that every run needs does not work, else 0.

    Raises:
        ConfigError: a certificate is given without a server.
    """
    if entrance:
        return _report(list(_entrance(entrance, authority)), "a device may join from here")
    if entrance is not None or authority is not None:
        raise ConfigError("goldfinch doctor checks a server with --entrance HOST:PORT --ca FILE, this machine without")
    return _report([finding for check in CHECKS for finding in check()], "everything a run needs is here")


def _entrance(entrance: str, authority: Path | None) -> Iterator[Finding]:
    """The server as a device sees it."""
    try:
        ahead = clock_difference(entrance, authority)
    except EngineError as error:
        yield Finding(FAIL, "server", str(error), "docs/deploy.md, 'What a message means'")
        return
    yield Finding(OK, "server", f"{entrance} answers" + (", its certificate is good" if authority else ", without TLS"))
    wrong = what_is_wrong(ahead)
    if wrong:
        yield Finding(FAIL, "clock", wrong, "set the clock of the one that is wrong, by NTP on both: timedatectl")
    else:
        yield Finding(OK, "clock", f"within {max(1.0, abs(ahead)):.0f} s of the server's")


def _report(findings: Sequence[Finding], all_well: str) -> int:
    for finding in findings:
        print(f"{finding.state:>4}  {finding.subject:18} {finding.found}")
        if finding.remedy:
            print(f"{'':26}-> {finding.remedy}")
    failed = sum(finding.state == FAIL for finding in findings)
    print(f"\n{failed} problem{'s' * (failed > 1)}" if failed else f"\n{all_well}")
    return 1 if failed else 0


def _versions() -> Iterator[Finding]:
    versions = package_versions()
    yield Finding(OK, "python", f"{versions['python']} on {platform.system()} {platform.machine()}")
    for name in ("torch", "torchvision", "flwr", "ray", "hydra-core", "finch-clust", "safetensors", "numpy", "triton"):
        if name in versions:
            yield Finding(OK, name, versions[name])
        else:
            use = {"ray": "engine=ray", "triton": "CUDA kernels"}.get(name)
            yield Finding(WARN if use else FAIL, name, "not installed", f"needed for {use}" if use else REINSTALL)
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
            yield Finding(FAIL, name, f"not beside {sys.executable}", REINSTALL)
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
    """A SuperLink that plain ``flwr run`` left behind keeps importing the folder it was started in."""
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
    """What here gets in the way of the application's packages; ``goldfinch`` itself does not look in this folder."""
    paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for stranger in shadows(paths):
        found = f"python -c, python -m and a SuperLink started here import {stranger} in place of Goldfinch's package"
        yield Finding(WARN, "this folder", found, "rename it, or work in another folder")


def _memory() -> Iterator[Finding]:
    shared, disk = Path("/dev", "shm"), shutil.disk_usage(Path.cwd())  # Ray's object store lives there
    if shared.exists():
        size = shutil.disk_usage(shared).total / 2**30
        state, remedy = (OK, "") if size >= 1 else (WARN, "docker: --shm-size=2g, or engine=inline")
        yield Finding(state, str(shared), f"{size:.1f} GiB", remedy)
    free = disk.free / 2**30
    state, remedy = (OK, "") if free > 2 else (WARN, "runs keep checkpoints")
    yield Finding(state, "disk", f"{free:.1f} GiB free here", remedy)
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
            state = FAIL if path.stem == "glyphs" else WARN
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


def clock_difference(entrance: str, authority: Path | None, now: Callable[[], datetime] | None = None) -> float:
    """Seconds by which this machine's clock is ahead of the server's, to about a second.

    Args:
        entrance: ``host:port`` of the SuperLink, or of the proxy before it.
        authority: certificate of the authority that the server's is verified with; ``None``: the server speaks no TLS.
        now: this machine's time.

    Raises:
        EngineError: the server cannot be reached, is another, or does not say what time it is.
    """
    now = now or partial(datetime.now, UTC)
    verify: ssl.SSLContext | bool = True
    if authority is not None:
        try:
            verify = ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise EngineError(f"--ca {authority}: no certificate can be read from there ({error})") from error
    url = f"{'https' if authority else 'http'}://{entrance}/health"
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
    """Why a clock ``ahead`` seconds ahead of the server's keeps a device out; ``None`` if it does not."""
    if -MAX_BEHIND <= ahead <= MAX_AHEAD:
        return None
    words = f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's clock"
    return f"{words}; the server turns away devices more than {MAX_AHEAD:g} s ahead or {MAX_BEHIND:g} s behind"


CHECKS = (_versions, _compute, _flower_programs, _local_superlink, _node_port, _shadows, _memory, _configuration, _data)
