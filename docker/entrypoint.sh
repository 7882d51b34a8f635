#!/bin/sh
# What a container does: certificates | superlink | serverapp | enrol | proxy | supernode | run | operate ... | any command.
# The environment variables are explained in compose.yaml and docs/deploy.md.
set -eu

role=${1:-help}
[ $# -eq 0 ] || shift
certificates=${GOLDFINCH_CERTIFICATES:-/certificates}
state=${GOLDFINCH_STATE:-/var/lib/goldfinch}
superlink=${GOLDFINCH_SUPERLINK:-superlink:8000}

# Lines of a log have a time (UTC) and no colours: those of this script, and those of a program with all that it starts.
say() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $role: $*" >&2; }
logged="python3 -P -m common.log_lines"

case ${superlink##*:} in
*[!0-9]* | "")
  say "GOLDFINCH_SUPERLINK is a name or an address with a port, such as superlink:8000, not $superlink"
  exit 78
  ;;
esac

# Docker's configuration can put a proxy into every container; the containers of compose.yaml reach each other without it.
host=${superlink%:*}
host=${host#[}
own=localhost,127.0.0.1,::1,proxy,${host%]}
no_proxy=${no_proxy:-${NO_PROXY:-}} # where both are set, Python reads this one alone
export no_proxy="${no_proxy:+$no_proxy,}$own" NO_PROXY="${NO_PROXY:+$NO_PROXY,}$own"

# A missing file is the usual mistake; say which one and where it comes from.
need() {
  origin="it is made by the certificates service"
  [ "$role" != supernode ] || origin="it is in this device's archive: copy it, and chown it to user $(id -u)"
  for file in "$@"; do
    [ -r "$file" ] || { say "$file is missing or not readable by user $(id -u); $origin"; exit 78; }
  done
}

connection() {
  need "$certificates/operator/ca.crt"
  mkdir -p "$FLWR_HOME"
  printf '[superlink]\ndefault = "goldfinch"\n\n[superlink.goldfinch]\naddress = "%s"\nroot-certificates = "%s"\n' \
    "$superlink" "$certificates/operator/ca.crt" >"$FLWR_HOME/config.toml"
}

# Is this device to be enrolled? Not if it was dismissed and has no new key: the others are enrolled without it.
may_take_part() {
  record=$certificates/operator/nodes/$1
  if [ ! -e "$record.dismissed-device" ] || [ -e "$record.pub" ]; then return 0; fi
  say "$1 was dismissed, and is left out; for a new key see docs/deploy.md, Rotating certificates and keys"
  return 1
}

# Run a program and wait for it; a signal to this shell goes on to the program and ends both.
supervise() {
  "$@" &
  child=$!
  trap 'trap - TERM INT; kill -TERM "$child" 2>/dev/null; wait "$child"; exit 143' TERM INT
  wait "$child"
}

case $role in
certificates) # makes what is missing; GOLDFINCH_HOSTS and GOLDFINCH_NODES are lists separated by spaces
  set --
  for host in ${GOLDFINCH_HOSTS:-}; do set -- "$@" --host "$host"; done
  for node in ${GOLDFINCH_NODES:-}; do set -- "$@" --node "$node"; done
  goldfinch devices certificates "$certificates" "$@"
  # this one service runs as root, without network, to give each party's volume to the user of all other containers
  [ "$(id -u)" -ne 0 ] || [ -z "${GOLDFINCH_OWNER:-}" ] || chown -R "$GOLDFINCH_OWNER" "$certificates/server" "$certificates/serverapp" "$certificates/operator" "$certificates/nodes"
  ;;
superlink)
  need "$certificates/server/ca.crt" "$certificates/server/server.pem" "$certificates/server/server.key" "$certificates/serverapp/superexec.secret"
  case ${GOLDFINCH_STORE:-sqlite} in
  sqlite) database=$state/superlink.db ;;
  memory) database=:flwr-in-memory: ;;
  *)
    say "GOLDFINCH_STORE is sqlite or memory, not $GOLDFINCH_STORE"
    exit 78
    ;;
  esac
  # A SuperLink that has lost its store knows no device: enrol again those that were enrolled before, as soon as it answers.
  # The command is no child of the SuperLink, which would not collect it.
  if [ -d "$certificates/operator/nodes" ]; then
    connection
    ($logged goldfinch devices enrol "$certificates/operator" --restore &)
  fi
  umask 077 # its database names devices, keys and runs
  exec $logged flower-superlink --host 0.0.0.0 --port 8000 --enable-supernode-auth \
    --ssl-ca-certfile "$certificates/server/ca.crt" --ssl-certfile "$certificates/server/server.pem" --ssl-keyfile "$certificates/server/server.key" \
    --isolation process --superexec-auth-secret-file "$certificates/serverapp/superexec.secret" \
    --database "$database" --disable-runtime-dependency-installation "$@"
  ;;
serverapp)
  need "$certificates/serverapp/ca.crt" "$certificates/serverapp/superexec.secret"
  exec $logged flower-superexec --runtime-api-address "$superlink" --root-certificates "$certificates/serverapp/ca.crt" \
    --superexec-auth-secret-file "$certificates/serverapp/superexec.secret" "$@"
  ;;
enrol) # a new device is enrolled by making its key and running this again; GOLDFINCH_CLIENTS: node=client, one a line
  connection
  if [ $# -eq 0 ]; then
    while read -r pair; do # a domain's name may have blanks
      if [ -n "$pair" ] && may_take_part "${pair%%=*}"; then set -- "$@" --client "$pair"; fi
    done <<END
${GOLDFINCH_CLIENTS:-}
END
    for node in ${GOLDFINCH_MORE_NODES:-}; do
      if may_take_part "$node"; then set -- "$@" --node "$node"; fi
    done
    if [ $# -eq 0 ] && [ -n "${GOLDFINCH_CLIENTS:-}${GOLDFINCH_MORE_NODES:-}" ]; then exit 0; fi # all were dismissed
  fi
  exec goldfinch devices enrol "$certificates/operator" "$@"
  ;;
proxy)
  need "$certificates/server/ca.crt" "$certificates/server/server.pem" "$certificates/server/server.key"
  polls=${GOLDFINCH_POLLS:-60}
  for number in "$polls" "${GOLDFINCH_PATIENCE:=300}"; do
    case $number in
    *[!0-9]* | 0*)
      say "GOLDFINCH_POLLS and GOLDFINCH_PATIENCE are whole numbers from 1, not $number"
      exit 78
      ;;
    esac
  done
  temporary=$(mktemp -d) # new and only this user's: nginx, which may be root, loads code that its configuration names
  [ "$(id -u)" -ne 0 ] || chmod 711 "$temporary" # its worker is then another user, who may enter
  # nginx keeps connections to the SuperLink open, and for that looks its name up only when it reads its configuration.
  # So the name is looked up here, and again every few seconds: a SuperLink that is made again may have another address.
  look_up() {
    case $superlink in
    "["*) echo "${superlink%:*}" ;; # an address of IPv6
    *) getent ahostsv4 "${superlink%:*}" | { read -r found rest && echo "$found"; } || true ;;
    esac
  }
  configure() { # ADDRESS; an empty one, of a name that is not known yet, refuses connections
    sed -e "s|@ADDRESS@|${GOLDFINCH_LISTEN:-8443}|" -e "s|@SUPERLINK@|${1:-127.0.0.1}:${superlink##*:}|" \
      -e "s|@NAME@|${GOLDFINCH_SUPERLINK_NAME:-${superlink%:*}}|" -e "s|@CERTIFICATES@|$certificates/server|" \
      -e "s|@TEMPORARY@|$temporary|" -e "s|@PATIENCE@|$GOLDFINCH_PATIENCE|" \
      -e "s|@RESERVED_POLLS@|$((polls * 15))|" -e "s|@RESERVED_BURST@|$((polls * 4))|" \
      -e "s|@SHARED_POLLS@|$((polls * 45))|" -e "s|@SHARED_WAITING@|$((polls * 15))|" \
      -e "s|@ADDRESS_POLLS@|$((polls * 30))|" -e "s|@ADDRESS_WAITING@|$((polls * 10))|" \
      "${GOLDFINCH_PROXY_CONFIGURATION:-/opt/goldfinch/proxy/nginx.conf}" >"$temporary/nginx.conf"
  }
  watch() { # PROCESS ADDRESS: nginx reads its configuration again every PATIENCE seconds (see nginx.conf), and at once
    # if the address is another one. It takes up a renewed certificate on the way.
    waited=0
    pause=3
    [ "$GOLDFINCH_PATIENCE" -ge 3 ] || pause=$GOLDFINCH_PATIENCE
    while sleep "$pause" && kill -0 "$1" 2>/dev/null; do
      waited=$((waited + pause))
      address=$(look_up)
      if [ -n "$address" ] && [ "$address" != "$2" ]; then
        configure "$address"
        set -- "$1" "$address"
        waited=$GOLDFINCH_PATIENCE
      fi
      [ "$waited" -lt "$GOLDFINCH_PATIENCE" ] || { waited=0; kill -HUP "$1" 2>/dev/null || break; }
    done
  }
  address=$(look_up)
  configure "$address"
  (watch $$ "$address" &) # $$ is nginx from here on; the loop, no child of its, ends after it
  # nginx opens /dev/stdout, and a socket, which systemd gives, cannot be opened. So it writes to a pipe with a name. When
  # nginx has ended, the pipe ends, and the folder is removed; systemd's SIGTERM to all of a service is left to nginx.
  mkfifo "$temporary/log"
  (trap '' TERM INT HUP && cat "$temporary/log" && rm -r "$temporary" &)
  cd "$temporary" # where nginx's socket is
  exec nginx -e stderr -p "$temporary" -c "$temporary/nginx.conf" >"$temporary/log"
  ;;
supernode)
  folder=${GOLDFINCH_KEY:-$certificates/node}
  need "$folder/ca.crt" "$folder/key"
  : "${GOLDFINCH_DOMAIN:?which domain this device holds}"
  node="domain=\"$GOLDFINCH_DOMAIN\" index=${GOLDFINCH_INDEX:-0} data-dir=\"${GOLDFINCH_DATA:-/data}\" state-dir=\"$state/clients\""
  [ -z "${GOLDFINCH_DEVICE:-}" ] || node="$node device=\"$GOLDFINCH_DEVICE\""
  [ -z "${GOLDFINCH_PRIVACY_MAX_EPSILON:-}" ] || node="$node privacy-max-epsilon=$GOLDFINCH_PRIVACY_MAX_EPSILON"
  [ -z "${GOLDFINCH_PRIVACY_DELTA:-}" ] || node="$node privacy-delta=$GOLDFINCH_PRIVACY_DELTA"
  [ -z "${GOLDFINCH_PRIVACY_MAX_RELEASES:-}" ] || node="$node privacy-max-releases=$GOLDFINCH_PRIVACY_MAX_RELEASES"
  [ -z "${GOLDFINCH_PRIVACY_SCORES:-}" ] || node="$node privacy-scores=\"$GOLDFINCH_PRIVACY_SCORES\""
  [ -z "${GOLDFINCH_NODE_CONFIG:-}" ] || node="$node $GOLDFINCH_NODE_CONFIG"
  [ -z "${GOLDFINCH_RESIDENT:-}" ] || node="$node resident=$GOLDFINCH_RESIDENT"
  server=${GOLDFINCH_SERVER:-proxy:8443}
  # Flower's node ends without a word if its clock is wrong; this says so. A server that is away is no reason not to start.
  $logged goldfinch doctor --server "$server" --ca "$folder/ca.crt" >&2 || true
  # A node that was killed is online for the SuperLink until its lease ends: 60 s after its last heartbeat, which two
  # constants of Flower set (interval 30 s, patience 2). Until then it is refused (activate-node: 412) and ends. It tries
  # again at once; Docker's own restarts would wait longer every time.
  attempts=0
  until supervise goldfinch-supernode --superlink "$server" --root-certificates "$folder/ca.crt" \
    --auth-supernode-private-key "$folder/key" --node-config "$node" \
    --metrics "${GOLDFINCH_METRICS:-$state/metrics.prom}" "$@"; do
    attempts=$((attempts + 1))
    [ "$attempts" -lt 30 ] || exit 1
    say "ended; started again (attempt $attempts). If its last process was killed, the server refuses it for up to 60 s"
    sleep 1
  done
  ;;
run) # submit a run and follow it: run method=fpl train.rounds=20
  connection
  exec goldfinch run engine=superlink "$@"
  ;;
operate) # any command, with a connection to the SuperLink: operate flwr supernode list
  connection
  exec "$@"
  ;;
table | list | doctor | report)
  exec goldfinch "$role" "$@"
  ;;
help)
  sed -n '2,3p' "$0"
  exec goldfinch
  ;;
*)
  exec "$role" "$@"
  ;;
esac
