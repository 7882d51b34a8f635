"""A start-up kit: one archive from which a device starts, in a container or as a service.

::

    ward-a/README            what to do, in ten lines
    ward-a/start             starts it: as a container of Docker, as a service of systemd, or in the foreground
    ward-a/settings.env      domain, server, data folder, limits
    ward-a/goldfinch.service the service
    ward-a/key, ca.crt       the device's key, and the authority's certificate
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
import time
from pathlib import Path

from common.errors import ConfigError, writing
from common.storage import write_bytes
from common.versions import VERSION
from server.admission.certificates import Certificates
from server.flower.processes import is_address

README = """Goldfinch on the device @NAME@, which is the client @CLIENT@ of @SERVER@.

1. Edit settings.env: the data folder, the limits of memory and CPU, a GPU.
2. Have Goldfinch here: the image goldfinch:@VERSION@ (docker load), or a checkout at /opt/goldfinch with
   make setup EXTRAS=device TORCH_INDEX=<index of PyTorch's CPU wheels>; a limit of epsilon: EXTRAS=device,privacy.
3. sudo ./start
Its log: docker logs goldfinch, or journalctl -u goldfinch. Is it in contact: docker ps, or systemctl status goldfinch.
Its numbers for a monitor: metrics.prom in its state folder /var/lib/goldfinch, or in the volume goldfinch-state.
Later changes: edit /etc/goldfinch/settings.env, then sudo /etc/goldfinch/start.
This folder holds the device's key: after the start, delete it and the archive.
"""

SETTINGS = """# which client this device is, and where its server is
GOLDFINCH_DOMAIN=@DOMAIN@
GOLDFINCH_INDEX=@INDEX@
GOLDFINCH_SERVER=@SERVER@
# the folder with this device's images
GOLDFINCH_DATA=/srv/images
# limits
OMP_NUM_THREADS=2
GOLDFINCH_CPUS=2
GOLDFINCH_MEMORY=3g
# further keys of --node-config, such as methods="fpl" privacy-max-epsilon=8.0; epsilon needs the extra privacy
GOLDFINCH_NODE_CONFIG=
# a GPU; its container needs the option --gpus all, too
#GOLDFINCH_DEVICE=cuda:0
# further options of docker run
GOLDFINCH_DOCKER_OPTIONS=
"""

UNIT = """[Unit]
Description=Goldfinch SuperNode
After=network-online.target time-sync.target
Wants=network-online.target

[Service]
Type=notify
NotifyAccess=all
User=goldfinch
StateDirectory=goldfinch
EnvironmentFile=/etc/goldfinch/settings.env
Environment=GOLDFINCH_KEY=/etc/goldfinch GOLDFINCH_STATE=/var/lib/goldfinch GOLDFINCH_CACHE=/var/lib/goldfinch/cache
Environment=PATH=/opt/goldfinch/.venv/bin:/usr/bin:/bin FLWR_HOME=/var/lib/goldfinch/flower
Environment=FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2
ExecStart=/opt/goldfinch/docker/entrypoint.sh supernode
TimeoutStartSec=infinity
TimeoutStopSec=15
KillMode=control-group
SuccessExitStatus=143
Restart=always
RestartSec=10
MemoryMax=3G
CPUQuota=200%
TasksMax=1024
NoNewPrivileges=true
ProtectSystem=strict
ProtectHome=tmpfs
PrivateTmp=true
BindReadOnlyPaths="/srv/images"

[Install]
WantedBy=multi-user.target
"""

START = """#!/bin/sh
# Start this device: by Docker if the image is here, else by systemd, else in the foreground.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
say() { printf 'start: %s\\n' "$*" >&2; }
[ "$(id -u)" -eq 0 ] || { say "run it with sudo"; exit 1; }
# the code that runs bring would be the user goldfinch, who reads the server's keys
[ ! -e /etc/goldfinch/authority ] && [ ! -e /etc/goldfinch/server ] || {
  say "/etc/goldfinch has the keys of a server; a device is a machine of its own"
  exit 1
}
install -d -o root -g root -m 0711 /etc/goldfinch # root's, as is the script: both decide what root does
if [ "$here" != /etc/goldfinch ]; then
  install -m 0600 "$here/key" "$here/ca.crt" "$here/settings.env" /etc/goldfinch/
  install -m 0755 "$here/start" /etc/goldfinch/
  install -m 0644 "$here/goldfinch.service" /etc/goldfinch/
fi
value() { sed -n "s/^$1=//p" /etc/goldfinch/settings.env | tail -n 1; }
data=$(value GOLDFINCH_DATA)
case $data in
"" | [!/]* | *[%:\\"\\\\]*)
  say "GOLDFINCH_DATA=$data in settings.env is not a whole path without the signs % : \\" \\\\"
  exit 1
  ;;
esac
[ -d "$data" ] || { say "GOLDFINCH_DATA=$data in settings.env is not a folder"; exit 1; }
memory=$(value GOLDFINCH_MEMORY | tr '[:lower:]' '[:upper:]')
memory=${memory%B} # systemd has no 3GB
echo "$memory" | grep -Eqx '[0-9]+(\\.[0-9]+)?[KMGT]?' || {
  say "GOLDFINCH_MEMORY=$(value GOLDFINCH_MEMORY) in settings.env is not a size such as 3g or 1500m"
  exit 1
}
cpus=$(value GOLDFINCH_CPUS)
echo "$cpus" | grep -Eqx '[0-9]+(\\.[0-9]+)?' &&
  cpu=$(echo "$cpus" | awk '{printf "%.0f%%", 100 * $1; exit $1 < 0.01}') || {
  say "GOLDFINCH_CPUS=$cpus in settings.env is not a number of CPUs such as 2 or 0.5"
  exit 1
}
# the state, with the record of what was released of the data, is where an earlier start put it
if [ -e /etc/systemd/system/goldfinch.service ] || [ -e /var/lib/goldfinch/clients ]; then
  state=/var/lib/goldfinch
elif docker volume inspect goldfinch-state >/dev/null 2>&1; then
  state=volume
else
  state=none
fi
if command -v docker >/dev/null && docker image inspect goldfinch:@VERSION@ >/dev/null 2>&1; then
  [ "$state" != /var/lib/goldfinch ] || {
    say "this device ran without Docker, and $state has its state, with the record of what was released of its data."
    say "To go on so: docker image rm goldfinch:@VERSION@"
    say "To go on in Docker: systemctl disable --now goldfinch && rm /etc/systemd/system/goldfinch.service"
    say "  docker run --rm --user 0 --network none --volume $state:/from --volume goldfinch-state:/to" \\
      "goldfinch:@VERSION@ sh -c 'cp -a /from/. /to/ && chown -R 10001:10001 /to' && mv $state $state.moved"
    exit 1
  }
  chown 10001:10001 /etc/goldfinch/key /etc/goldfinch/ca.crt # the user of the image
  docker run --rm --network none --volume "$data:/data:ro" goldfinch:@VERSION@ sh -c '[ -r /data ] && [ -x /data ]' || {
    say "the image's user, 10001, cannot read GOLDFINCH_DATA=$data: chmod -R o+rX it"
    exit 1
  }
  docker rm --force goldfinch >/dev/null 2>&1 || true # of an earlier start; its state is in the volume
  exec docker run --detach --name goldfinch --init --restart unless-stopped \\
    --read-only --tmpfs /tmp:size=512m,mode=1777 --cap-drop ALL --security-opt no-new-privileges \\
    --memory "$memory" --cpus "$cpus" --pids-limit 1024 \\
    --log-driver json-file --log-opt max-size=10m --log-opt max-file=3 \\
    --health-cmd 'python3 -IS /opt/goldfinch/health.py /var/lib/goldfinch/metrics.prom' \\
    --health-interval 15s --health-timeout 30s --health-retries 3 --health-start-period 180s \\
    --env-file /etc/goldfinch/settings.env --env GOLDFINCH_DATA=/data \\
    --volume /etc/goldfinch:/certificates/node:ro --volume "$data:/data:ro" \\
    --volume goldfinch-state:/var/lib/goldfinch $(value GOLDFINCH_DOCKER_OPTIONS) goldfinch:@VERSION@ supernode
fi
[ "$state" != volume ] || {
  say "this device ran in Docker, its state is in the volume goldfinch-state, and the image goldfinch:@VERSION@ is not"
  say "here: docker load it"
  exit 1
}
[ -x /opt/goldfinch/.venv/bin/goldfinch-supernode ] || {
  say "neither the image goldfinch:@VERSION@ nor /opt/goldfinch/.venv is here; see README"
  exit 1
}
id goldfinch >/dev/null 2>&1 || useradd --system --home-dir /var/lib/goldfinch --shell /usr/sbin/nologin goldfinch
chown goldfinch: /etc/goldfinch/key /etc/goldfinch/ca.crt
setpriv --reuid goldfinch --regid goldfinch --clear-groups sh -c '[ -r "$0" ] && [ -x "$0" ]' "$data" || {
  say "user goldfinch cannot read GOLDFINCH_DATA=$data: chmod -R o+rX it, and chmod o+x the folders above it"
  exit 1
}
if [ -d /run/systemd/system ]; then
  folder=$(echo "$data" | sed 's/[&|]/\\\\&/g')
  sed -e "s/^MemoryMax=.*/MemoryMax=$memory/" -e "s/^CPUQuota=.*/CPUQuota=$cpu/" \\
    -e "s|^BindReadOnlyPaths=.*|BindReadOnlyPaths=\\"$folder\\"|" "$here/goldfinch.service" \\
    >/etc/systemd/system/goldfinch.service
  systemctl daemon-reload
  systemctl enable goldfinch
  exec systemctl restart goldfinch # also a running one, for changed settings
fi
say "neither Docker nor systemd is here; it runs in the foreground"
install -d -o goldfinch /var/lib/goldfinch
while IFS= read -r line; do
  case $line in [A-Z]*=*) export "$line" ;; esac
done </etc/goldfinch/settings.env
export GOLDFINCH_KEY=/etc/goldfinch GOLDFINCH_STATE=/var/lib/goldfinch GOLDFINCH_CACHE=/var/lib/goldfinch/cache
export FLWR_HOME=/var/lib/goldfinch/flower FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2 PATH=/opt/goldfinch/.venv/bin:/usr/bin:/bin
cd /var/lib/goldfinch
exec setpriv --reuid goldfinch --regid goldfinch --clear-groups /opt/goldfinch/docker/entrypoint.sh supernode
"""

FILES = {
    "README": (README, 0o644),
    "settings.env": (SETTINGS, 0o644),
    "goldfinch.service": (UNIT, 0o644),
    "start": (START, 0o755),
}
"""The texts of a kit with their modes. ``@WORDS@`` stand for what differs between devices."""


ENOUGH_BYTES = 2**16
"""What a trial writes: as much as a kit."""


def check_place(path: Path) -> None:
    """Check that a file can be written at ``path``, by one beside it, before a step that cannot be taken back.

    Raises:
        OSError: it cannot.
    """
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    trial = path.with_name(f".{path.name}.trial")
    try:
        write_bytes(trial, bytes(ENOUGH_BYTES), private=True)
        trial.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_kit(path: Path, files: Certificates, name: str, server: str) -> None:
    """Check that a kit can be made, before anything is enrolled for it.

    Args:
        path: the archive.
        files: the federation's certificates.
        name: the device's name.
        server: ``host:port`` by which the device reaches the server.

    Raises:
        ConfigError: the device's key is not here, ``server`` has no port, or ``path`` cannot be written.
    """
    if not is_address(server):
        found = f"--server {server} is not HOST:PORT" if server else "--kit needs --server HOST:PORT"
        raise ConfigError(f"{found}, as devices reach the proxy, such as fl.example.org:8443 or [2001:db8::1]:8443")
    key, authority = files.node_key(name), files.node(name) / files.authority.name
    if not key.is_file() or not authority.is_file():
        raise ConfigError(
            f"{key} and {authority.name} next to it are not here: make the kit where they were made, or give the "
            "device a new key (docs/deploy.md, Rotating certificates and keys)"
        )
    with writing(path, "another --kit"):
        check_place(path)


def write_kit(path: Path, files: Certificates, name: str, client: str, server: str) -> None:
    """Write the kit of a device to ``path``, readable by this user alone, because it holds the device's key.

    Args:
        path: the archive (``.tar``).
        files: the federation's certificates.
        name: the device's name.
        client: the client that its key is enrolled for.
        server: ``host:port`` by which the device reaches the server.

    Raises:
        ConfigError: as :func:`check_kit`.
    """
    check_kit(path, files, name, server)
    key, authority = files.node_key(name), files.node(name) / files.authority.name
    domain, _, index = client.rpartition("-")
    words = {"NAME": name, "CLIENT": client, "SERVER": server, "VERSION": VERSION, "DOMAIN": domain, "INDEX": index}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for file, (text, mode) in FILES.items():
            for word, value in words.items():
                text = text.replace(f"@{word}@", value)
            _add(archive, f"{name}/{file}", text.encode(), mode)
        _add(archive, f"{name}/key", key.read_bytes(), 0o600)
        _add(archive, f"{name}/{authority.name}", authority.read_bytes(), 0o644)
    write_bytes(path, content.getvalue(), private=True)


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(content), mode, int(time.time())
    archive.addfile(entry, io.BytesIO(content))
