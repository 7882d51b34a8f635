"""``goldfinch doctor``: what works on this machine, and how to fix what does not."""

import importlib.util
import math
import os
import platform
import shutil
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from common.choices import CONF
from common.composition import compose_config
from common.data.domain import DataSource
from common.errors import ConfigError, EngineError, GoldfinchError
from common.extras import install_command
from common.settings import load_settings
from common.text import counted
from common.versions import package_versions, shadows
from server.flower.processes import connections, flower_home, is_address
from server.flower.submit import check_ray

OK, NOTE, SOON, FAIL = "ok", "note", "SOON", "FAIL"
WARNING_DAYS = 30
"""A certificate with fewer days left is reported; the operator's command renews it from then on."""

ENDS_SOON = 3
"""Exit status if nothing is wrong but that the server's certificate ends soon."""

GIB = 2**30
PINNED_FLOWER = "1.41"
PROGRAMS = ("flwr", "flower-superlink", "flower-supernode", "flower-superexec", "flwr-clientapp", "flwr-serverapp")
PACKAGES = ("torch", "torchvision", "flwr", "ray", "hydra-core", "finch-clust", "safetensors", "numpy", "triton")
OPTIONAL = {
    "ray": ("engine=ray", "simulation"),
    "finch-clust": ("method.clustering=finch-clust", "clustering"),
    "triton": ("CUDA kernels", None),
}
"""Packages that only some runs need: what needs it, and the extra with it. PyTorch brings triton where it has CUDA."""

REINSTALL = "make setup, or pip install -c requirements.txt in the checkout"

FLOWERS_OWN = ".flower.ai"
"""Flower writes a server of its own into every new ``config.toml``; nobody asked for it to be looked up."""

MAX_AHEAD, MAX_BEHIND = 5.0, 300.0
"""Largest differences in seconds between the clocks of a device and the SuperLink with which Flower accepts it."""

NODE_PORT = 9094
"""The port that a SuperNode listens on unless it is given ``--port``."""

REACHABLE = (
    "the server can be reached from here; it admits a device whose key is enrolled (goldfinch devices enrol), which "
    "only the device's SuperNode can try"
)
"""What :func:`examine` says of a server without a problem."""

RESOLUTION = 1.0
"""Seconds: HTTP's ``Date`` leaves fractions out."""

OTHER_SERVER = "that is neither a SuperLink nor its proxy: correct HOST:PORT"
ASK_WITH_TLS = "if the server speaks TLS, name the authority's certificate: --ca FILE"

PLAIN_REFUSED = 412
"""What the proxy answers to a request without TLS."""

GATEWAY_FAILURES = (502, 503, 504)
"""What a proxy answers if no server does behind it."""


class NoServerError(EngineError):
    """What was found in the place of a server, and what to do."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}; {remedy}")
        self.found, self.remedy = found, remedy


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        name: what was checked.
        result: what the check says.
        remedy: how to fix it; empty if nothing needs to be done.
        state: ``OK``, ``NOTE`` (some runs are affected), ``SOON`` (every run will be), or ``FAIL`` (every run is).
    """

    name: str
    result: str
    remedy: str = ""
    state: str = OK


def examine(server: str | None = None, authority: Path | None = None) -> int:
    """Print what works on this machine, or whether a device here can join the server at ``server``.

    Args:
        server: ``host:port`` of the SuperLink, or of the reverse proxy before it; ``None`` checks this machine.
        authority: certificate of the authority that the server's is verified with; ``None``: the server speaks no TLS.

    Returns:
        1 if something that every run needs does not work, 3 if only the server's certificate ends soon, else 0.

    Raises:
        ConfigError: a certificate is given without a server, or ``server`` is not ``host:port``.
    """
    if server:
        if not is_address(server):
            raise ConfigError(f"--server {server} is not HOST:PORT, such as fl.example.org:8443 or [::1]:8443")
        return _report(_server(server, authority), REACHABLE)
    if server is not None or authority is not None:
        raise ConfigError("goldfinch doctor checks a server with --server HOST:PORT --ca FILE, this machine without")
    return _report(_this_machine(), "everything a run needs is here")


def examine_data(overrides: Sequence[str]) -> int:
    """Print what of a data set's files is there and what is missing, domain by domain.

    Args:
        overrides: ``data=NAME`` and its settings, as of ``goldfinch run``.

    Returns:
        1 if a domain cannot be read, else 0.

    Raises:
        ConfigError: a setting is wrong, or is none of the data set.
    """
    for item in overrides:
        if item.partition("=")[0].partition(".")[0] != "data":
            raise ConfigError(f"{item}: goldfinch doctor checks data alone, as in goldfinch doctor data=pacs")
    source = load_settings(overrides).data
    findings = [_domain(source, domain) for domain in source.domains]
    if all(finding.state == OK for finding in findings):
        findings += _classes(source)
    remedies = {finding.remedy for finding in findings}
    if len(remedies) == 1 and findings[0].state == FAIL:
        findings = [replace(findings[0], name=", ".join(source.domains))]
    return _report(
        findings, f"every domain of data={source.name} is there; a run reads the images and names broken ones"
    )


def _domain(source: DataSource, name: str) -> Finding:
    """Look for the files of a domain; say what is missing."""
    try:
        source.check_files([name])
    except (GoldfinchError, ValueError) as error:
        return Finding(name, "cannot be read", " ".join(str(error).split()), FAIL)
    return Finding(name, "its files are there")


def _classes(source: DataSource) -> list[Finding]:
    """Check that the classes of all domains can be told."""
    try:
        _ = source.class_names
    except GoldfinchError as error:
        return [Finding("classes", "cannot be told", " ".join(str(error).split()), FAIL)]
    return []


def _report(findings: Sequence[Finding], all_well: str) -> int:
    failed = 0
    for finding in findings:
        if finding.state == FAIL:
            failed += 1
        print(f"{finding.state:>4}  {finding.name:18} {finding.result}")
        if finding.remedy:
            print(f"{'':26}-> {finding.remedy}")
    if not failed:
        print(f"\n{all_well}")
        if any(finding.state == SOON for finding in findings):
            return ENDS_SOON
        return 0
    print(f"\n{counted(failed, 'problem')}")
    return 1


def _server(server: str, authority: Path | None) -> list[Finding]:
    """Check the connection to the server, its certificate and its clock."""
    try:
        ahead, days = _ask(server, authority)
    except NoServerError as error:
        return [Finding("server", error.found, error.remedy, FAIL)]
    findings = [Finding("server", f"{server} answers"), _clock(ahead)]
    if days is not None:
        findings.append(_certificate(days))
    return findings


def _certificate(days: float) -> Finding:
    if days < WARNING_DAYS:
        remedy = (
            "goldfinch devices certificates, where the authority is kept; the proxy loads the new server/ by itself; "
            "then restart the SuperLink, which ends an active run (continue it by resume=true)"
        )
        return Finding("certificate", f"ends in {math.floor(days)} days", remedy, SOON)
    return Finding("certificate", f"valid for {math.floor(days)} days")


def _clock(ahead: float) -> Finding:
    wrong = what_is_wrong(ahead)
    if wrong:
        return Finding("clock", wrong, "set the clock of the one that is wrong, by NTP on both: timedatectl", FAIL)
    return Finding("clock", f"within {max(1.0, abs(ahead)):.0f} s of the server's")


def _this_machine() -> list[Finding]:
    versions = package_versions()
    findings = [Finding("python", f"{versions['python']} on {platform.system()} {platform.machine()}")]
    for name in PACKAGES:
        findings.append(_package(name, versions))
    findings += [_flower_version(versions), *_ray(), _cpu(), *_cuda()]
    for name in PROGRAMS:
        findings.append(_program(name))
    findings += [
        _interpreter(),
        _path(),
        _run_time_installation(),
        _local_superlink(),
        *_connections(),
        _node_port(),
        *_shadows(),
    ]
    findings += [_shared_memory(), _disk(), _memory(), _configuration(), _client_app(), _data_folder()]
    for path in sorted((CONF / "data").glob("*.yaml")):
        findings.append(_data(path.stem))
    return findings


def _package(name: str, versions: Mapping[str, str]) -> Finding:
    if name in versions:
        return Finding(name, versions[name])
    if name in OPTIONAL:
        return _optional(name)
    return Finding(name, "not installed", REINSTALL, FAIL)


def _optional(name: str) -> Finding:
    needed, extra = OPTIONAL[name]
    remedy = ""
    if extra is not None:
        remedy = install_command(extra)
    return Finding(name, f"not installed; only {needed} needs it", remedy, NOTE)


def _ray() -> list[Finding]:
    """Check what would keep Ray from starting its workers."""
    if importlib.util.find_spec("ray") is None:
        return []
    try:
        check_ray()
    except ConfigError as error:
        return [Finding("engine=ray", str(error), "", NOTE)]
    result = "can start its workers"
    cluster = os.environ.get("RAY_ADDRESS")
    if cluster:
        result += f"; engine.address=auto joins {cluster}, as RAY_ADDRESS says"
    return [Finding("engine=ray", result)]


def _flower_version(versions: Mapping[str, str]) -> Finding:
    flower = versions.get("flwr", "not installed")
    if flower.startswith(f"{PINNED_FLOWER}."):
        return Finding("flwr version", f"the tested one, {PINNED_FLOWER}")
    remedy = f"every machine of a federation needs flwr {PINNED_FLOWER}: install requirements.txt"
    return Finding("flwr version", f"{flower}, tested with {PINNED_FLOWER}", remedy, FAIL)


def _cpu() -> Finding:
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return Finding("cpu", f"{os.cpu_count()} CPUs, OMP_NUM_THREADS {threads}; a client uses train.threads")


def _cuda() -> list[Finding]:
    """Check each GPU that torch sees, or why it sees none."""
    import torch

    if torch.cuda.is_available():
        findings = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            findings.append(Finding(f"cuda:{index}", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"))
        return findings
    if not Path("/dev/nvidiactl").exists():
        return [Finding("cuda", "no GPU; clients train on the CPU")]
    built = torch.version.cuda or "no CUDA"
    remedy = "compare the driver's CUDA version (nvidia-smi) with torch's; in a container pass --gpus all"
    return [Finding("cuda", f"a driver is here, but torch (built for {built}) sees no device", remedy, NOTE)]


def _program(name: str) -> Finding:
    folder = Path(sys.executable).parent
    if (folder / name).exists():
        return Finding(name, "installed")
    return Finding(name, f"not next to {sys.executable}", REINSTALL, FAIL)


def _interpreter() -> Finding:
    """Check that a service with a user of its own could start this environment's Python."""
    program = Path(sys.executable).resolve()
    for folder in reversed(program.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            result = f"{program} is below {folder}, which other users of this machine cannot enter"
            remedy = "for a service with its own user, install Python and Goldfinch elsewhere, such as below /opt"
            return Finding("interpreter", result, remedy, NOTE)
    return Finding("interpreter", f"{program}, which every user can start")


def _path() -> Finding:
    """Check that a plain ``flwr run`` finds Flower's programs of this environment."""
    folder = Path(sys.executable).parent
    program = shutil.which("flower-superlink")
    if program is not None and Path(program).resolve().parent == folder.resolve():
        return Finding("PATH", f"Flower's programs are {folder}'s")
    remedy = f"Flower starts its programs by bare name: source {folder / 'activate'} before a plain flwr run"
    return Finding("PATH", f"flower-superlink is {program or 'not on the PATH'}", remedy, NOTE)


def _run_time_installation() -> Finding:
    if os.environ.get("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION") == "1":
        return Finding("flwr run", "will not install dependencies at run time")
    result = "a SuperLink started by plain `flwr run` would install all dependencies for every run"
    remedy = "export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 before it (goldfinch run does)"
    return Finding("flwr run", result, remedy, NOTE)


def _local_superlink() -> Finding:
    """Check for a SuperLink of an earlier ``flwr run``, which still imports code from the folder it was started in."""
    port = os.environ.get("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "39091")
    try:
        running = httpx.get(f"http://127.0.0.1:{port}/health", timeout=1.0, trust_env=False).is_success
    except httpx.HTTPError:
        running = False
    if not running:
        return Finding(f"port {port}", "no local SuperLink of an earlier flwr run")
    result = "Flower's local SuperLink is running; simulations import code from where it was started"
    remedy = "if that is another checkout, stop it: pkill -TERM -f 'flower-superlink --insecure --simulation'"
    return Finding(f"port {port}", result, remedy, NOTE)


def _connections() -> list[Finding]:
    """Check whether the SuperLinks in Flower's ``config.toml`` accept connections, as ``engine=superlink`` needs."""
    findings = []
    for name, address in connections(flower_home() / "config.toml").items():
        parts = urlsplit(f"//{address}")
        if (parts.hostname or "").endswith(FLOWERS_OWN):
            continue
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=2.0):
                findings.append(Finding(f"connection {name}", f"the SuperLink at {address} accepts connections"))
        except (OSError, ValueError) as error:
            remedy = "start it, if a run is to use it (docs/deploy.md)"
            findings.append(Finding(f"connection {name}", f"no SuperLink at {address}: {error}", remedy, NOTE))
    return findings


def _node_port() -> Finding:
    """Check the port on which a SuperNode serves its own health and processes, by default always the same one."""
    name = f"port {NODE_PORT}"
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", NODE_PORT)) == 0
    if not taken:
        return Finding(name, "free for a SuperNode")
    result = "taken, so a SuperNode that is started here without --port ends at once"
    return Finding(name, result, "give every further SuperNode of a machine its own --port", NOTE)


def _shadows() -> list[Finding]:
    """Check for files here with the names of Goldfinch's packages; ``goldfinch`` itself does not import from here."""
    paths = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    findings = []
    for stranger in shadows(paths):
        result = f"python -c, python -m and a SuperLink started here import {stranger} in place of Goldfinch's package"
        findings.append(Finding("this folder", result, "rename it, or work in another folder", NOTE))
    return findings


def _shared_memory() -> Finding:
    """Check the size of the folder in which Ray keeps its objects."""
    folder = Path("/dev", "shm")
    if not folder.exists():
        return Finding(str(folder), "not on this system")
    size = shutil.disk_usage(folder).total / GIB
    if size >= 1:
        return Finding(str(folder), f"{size:.1f} GiB")
    return Finding(str(folder), f"{size:.1f} GiB", "docker: --shm-size=2g, or engine=inline", NOTE)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    if free > 2:
        return Finding("disk", f"{free:.1f} GiB free here")
    return Finding("disk", f"{free:.1f} GiB free here", "runs keep checkpoints: free some space, or name output=", NOTE)


def _memory() -> Finding:
    if not hasattr(os, "sysconf"):
        return Finding("memory", "unknown on this system")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return Finding("memory", f"{total:.1f} GiB; a Ray actor with torch takes about 0.9 GiB")


def _configuration() -> Finding:
    methods = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
    try:
        for method in methods:
            compose_config([f"method={method}"])
    except GoldfinchError as error:
        return Finding("configuration", str(error), "reinstall Goldfinch", FAIL)
    return Finding("configuration", f"{len(methods)} methods")


def _client_app() -> Finding:
    if importlib.util.find_spec("client.app") is None:
        return Finding("client.app", "cannot be imported", "python -m pip install -e . --no-deps", FAIL)
    return Finding("client.app", "can be imported")


def _data_folder() -> Finding:
    root = os.environ.get("GOLDFINCH_DATA")
    return Finding("GOLDFINCH_DATA", root or "unset; data sets other than glyphs need it or data.root=FOLDER")


def _data(name: str) -> Finding:
    """Load the first domain of a data set. Only glyphs needs no files, so only its failure is one of every run."""
    try:
        source = load_settings([f"data={name}"]).data
        if name != "glyphs" and not (os.environ.get("GOLDFINCH_DATA") or source.root):
            return Finding(name, "no folder given", "set GOLDFINCH_DATA or data.root", NOTE)
        domain = source.load(source.domains[0])
    except GoldfinchError as error:
        state = NOTE
        if name == "glyphs":
            state = FAIL
        return Finding(name, "cannot be used", str(error).splitlines()[0], state)
    return Finding(name, f"{domain.name}: {len(domain.train)} train, {len(domain.test)} test")


def clock_difference(server: str, authority: Path | None, now: Callable[[], datetime] | None = None) -> float:
    """Return the seconds by which this machine's clock is ahead of the server's, to about a second.

    Args:
        server: ``host:port`` of the SuperLink, or of the proxy before it.
        authority: certificate of the authority that the server's is verified with; ``None``: the server speaks no TLS.
        now: this machine's time.

    Raises:
        NoServerError: the server cannot be reached, is no SuperLink, or its reply has no time.
    """
    ahead, _ = _ask(server, authority, now)
    return ahead


def _days_left(response: httpx.Response) -> float | None:
    """Return the days until the server's certificate ends; ``None`` without TLS. The connection must be open."""
    secure = response.extensions["network_stream"].get_extra_info("ssl_object")
    if secure is None:
        return None
    return (ssl.cert_time_to_seconds(secure.getpeercert()["notAfter"]) - time.time()) / 86_400


def _ask(server: str, authority: Path | None, now: Callable[[], datetime] | None = None) -> tuple[float, float | None]:
    """Return by how much this machine's clock is ahead, see :func:`clock_difference`, and the certificate's days."""
    now = now or partial(datetime.now, UTC)
    verify: ssl.SSLContext | bool = True
    if authority is not None:
        try:
            verify = ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise NoServerError(
                f"--ca {authority}: no certificate can be read from there ({error})",
                "name the federation's ca.crt: it is in every device's folder of nodes/, and in its kit",
            ) from error
    scheme = "http"
    if authority is not None:
        scheme = "https"
    url = f"{scheme}://{server}/health"
    try:
        before = now()
        with httpx.stream("GET", url, timeout=20.0, verify=verify) as response:
            after = now()
            days = _days_left(response)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoServerError(f"{url}{_by_proxy(url)}: {error}", _way_on(error, scheme, now())) from error
    if not response.is_success:
        found = f"{url}{_by_proxy(url)} answers {response.status_code}"
        raise NoServerError(found, _way_on_after(response.status_code, scheme))
    try:
        theirs = parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError) as error:
        raise NoServerError(f"{url} sends no time (HTTP's Date)", OTHER_SERVER) from error
    return (before + (after - before) / 2 - theirs).total_seconds() - RESOLUTION / 2, days


def _by_proxy(url: str) -> str:
    """Return which proxy the environment puts before ``url``, and what leaves it out; empty without one."""
    asked = urlsplit(url)
    proxies = getproxies()
    address = proxies.get(asked.scheme) or proxies.get("all")
    if not address or proxy_bypass(asked.netloc):
        return ""
    host = urlsplit(address if "//" in address else f"//{address}").netloc.rpartition("@")[2]
    return f" (by the proxy {host} of {asked.scheme}_proxy or all_proxy; no_proxy={asked.hostname} leaves it out)"


def _way_on_after(status: int, scheme: str) -> str:
    """Return what to do after an answer that is none of a SuperLink."""
    if status in GATEWAY_FAILURES:
        return (
            "the proxy answers, and the SuperLink behind it does not, or with a certificate that has ended: start it, "
            "restart it after a renewal, or read its log and the proxy's"
        )
    if status == PLAIN_REFUSED and scheme == "http":
        return ASK_WITH_TLS
    return OTHER_SERVER


def _way_on(error: Exception, scheme: str, now: datetime) -> str:
    """Return what to do after a request that ``error`` ended."""
    text = str(error)
    if "mismatch" in text:
        return "goldfinch devices certificates with every --host NAME, then restart SuperLink and proxy"
    if "local issuer" in text or "self-signed" in text:
        return "give this device the federation's ca.crt"
    if "CERTIFICATE_VERIFY" in text:
        clock = f"{now:%Y-%m-%d %H:%M} UTC"
        return f"goldfinch devices certificates, where the authority is kept; or set this machine's clock, at {clock}"
    if "SSL" in text:
        return "what answers there speaks no TLS: leave --ca out, or name the port of what does"
    if "[Errno -" in text:  # of a look-up
        return "correct HOST, or this machine's DNS"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "start the SuperLink or its proxy there, correct HOST:PORT, or let that port through the firewall"
    if scheme == "http":
        return ASK_WITH_TLS
    return "read the log of the SuperLink, and of its proxy"


def what_is_wrong(ahead: float) -> str | None:
    """Return why Flower refuses a device with a clock ``ahead`` seconds ahead of the server's; else ``None``."""
    if -MAX_BEHIND <= ahead <= MAX_AHEAD:
        return None
    difference = f"{-ahead:,.0f} s behind"
    if ahead > 0:
        difference = f"{ahead:,.0f} s ahead of"
    limits = f"more than {MAX_AHEAD:g} s ahead or {MAX_BEHIND:g} s behind"
    return f"{difference} the server's clock; the server turns away devices {limits}"
