#!/bin/bash
# A federation of containers, from nothing to the table, with a node killed on the way; then everything is taken down.
#
#   docker/demo.sh [KEY=VALUE ...]      overrides of the run, such as train.rounds=10
#
# Settings come from docker/.env and the environment. DEMO_KEEP=1 leaves it running; DEMO_BUILD=0 uses the images that
# are there; DEMO_ROUNDS=6. Needs Docker with the compose plugin. Every step is checked: the exit status is 0 only if all of it worked.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
compose=(docker compose --project-name "${DEMO_PROJECT:-goldfinch-demo}" --file "$here/compose.yaml")
rounds=${DEMO_ROUNDS:-6} # at least 3: one before, one during, one after the failure
victim=supernode-sketch
client=sketch-0
started=$SECONDS
log=$(mktemp)

say() { printf '%4ds  %s\n' $((SECONDS - started)) "$*"; }
fail() {
  say "FAILED: $*" >&2
  "${compose[@]}" logs --no-color --tail 15 >&2 || true
  exit 1
}
finish() {
  code=$?
  trap - EXIT INT TERM
  if [ "${DEMO_KEEP:-0}" = 1 ]; then
    say "left running; take it down with: docker compose --project-name ${DEMO_PROJECT:-goldfinch-demo} --file docker/compose.yaml down --volumes"
  else
    say "taking everything down"
    "${compose[@]}" --profile '*' down --volumes --remove-orphans --timeout 20 >/dev/null 2>&1 || code=1
    left=$(docker ps --all --quiet --filter "label=com.docker.compose.project=${DEMO_PROJECT:-goldfinch-demo}" | wc -l)
    [ "$left" -eq 0 ] || { say "$left containers are left"; code=1; }
    [ "$code" -ne 0 ] || say "done: everything worked, nothing is left running"
  fi
  rm -f "$log"
  exit $code
}
# wait_for SECONDS WHAT COMMAND...: until the command succeeds
wait_for() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || fail "$what did not happen in time"
    sleep 2
  done
}
# state FIELD SERVICE: of its container
state() { docker inspect --format "{{$1}}" "$("${compose[@]}" ps --all --quiet "$2")"; }
healthy() { [ "$(state .State.Health.Status "$1")" = healthy ]; }

command -v docker >/dev/null || { echo "Docker is not installed" >&2; exit 1; }
docker info >/dev/null 2>&1 || { echo "no Docker Engine answers; is it running, and may this user use it?" >&2; exit 1; }
docker compose version >/dev/null 2>&1 || { echo "Docker's compose plugin is not installed" >&2; exit 1; }
"${compose[@]}" --profile '*' down --volumes --remove-orphans >/dev/null 2>&1 || true
trap finish EXIT
trap 'exit 130' INT # the exit status of an interrupted command may be 0
trap 'exit 143' TERM

if [ "${DEMO_BUILD:-1}" = 1 ]; then
  say "building the images"
  "${compose[@]}" build --quiet superlink proxy || fail "the images could not be built"
fi
say "images: $(docker images --format '{{.Repository}} {{.Size}}' | grep '^goldfinch' | sort -u | paste -sd, | sed 's/,/, /')"

say "starting: certificates, SuperLink, SuperExec, proxy, four SuperNodes of one domain each"
"${compose[@]}" up --detach --no-build --quiet-pull >"$log" 2>&1 || { tail -5 "$log"; fail "the services did not start"; }
for service in superlink serverapp proxy supernode-handwritten supernode-printed supernode-signs supernode-sketch; do
  wait_for 600 "$service becoming healthy" healthy "$service"
done
"${compose[@]}" logs --no-color --no-log-prefix enrol | sed 's/\x1b\[2K//; s/^/       /'
say "all are healthy"

say "from inside a device: the server's own port cannot be reached, and the reverse proxy refuses to submit a run"
"${compose[@]}" exec -T "$victim" python3 - <<'PYTHON' || fail "a device reached what it must not"
import socket, ssl, sys, urllib.error, urllib.request

for host in ("superlink", "serverapp"):
    try:
        socket.create_connection((host, 8000), timeout=3).close()
        sys.exit(f"{host}:8000 can be reached")
    except OSError as error:
        print(f"       {host}:8000: {error}")
context = ssl.create_default_context(cafile="/certificates/node/ca.crt")
for path in ("start-run", "register-node"):
    request = urllib.request.Request(f"https://proxy:8443/v1/control/{path}", data=b"", method="POST")
    try:
        urllib.request.urlopen(request, timeout=10, context=context)
        sys.exit(f"{path} was let through")
    except urllib.error.HTTPError as error:
        print(f"       {path}: {error.code} {error.read().decode().strip()}")
        if error.code != 403:
            sys.exit(1)
PYTHON

say "submitting FPL, $rounds rounds"
"${compose[@]}" --profile operator run --rm --no-deps -T run method=fpl rounds=guarded "train.rounds=$rounds" rounds.registration=900 rounds.deadline=300 \
  output=/outputs/fpl overwrite=true "$@" >"$log" 2>&1 &
run=$!
# the run's own event file says where it is; the log is for people
round_done() { "${compose[@]}" exec -T serverapp grep -q "\"event\": \"round done\".*\"round\": $1\b" /outputs/fpl/events.jsonl; }
reached() { ! kill -0 "$run" 2>/dev/null || round_done "$1"; }
wait_for 1200 "round 1" reached 1
kill -0 "$run" 2>/dev/null || { sed 's/^/       /' "$log"; fail "the run ended early"; }
say "round 1 is done; killing everything in $victim (kill -9)"
"${compose[@]}" exec -T "$victim" sh -c 'kill -9 -1' >/dev/null 2>&1 || true
before=$SECONDS
wait_for 900 "the round after the kill" reached 2
restarts=$(state .RestartCount "$victim")
say "round 2 is done, $((SECONDS - before)) s after the kill; Docker has restarted $victim $restarts times"
code=0
wait "$run" || code=$?
sed 's/^/       /' "$log"
[ $code -eq 0 ] || fail "the run failed"
say "the run is finished"
[ "$(state .RestartCount "$victim")" -ge 1 ] || fail "$victim was not killed: Docker has not restarted it"

"${compose[@]}" exec -T serverapp python3 /opt/goldfinch/check_record.py /outputs/fpl --rounds "$rounds" --clients 4 --killed "$client" \
  2>&1 | sed 's/^/       /' || fail "the run's record is not as it should be"
"${compose[@]}" --profile operator run --rm --no-deps -T tools table /outputs/fpl || fail "no table"
