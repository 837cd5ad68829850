#!/usr/bin/env bash
# Everything that has to pass: set-up, build, lint and types, Go with and without cgo, the C boundary, pytest, and the
# acceptance cases where they lie beside the checkout, embedded and on Ray. Runs every part and reports at the end which failed.
#
#   bash build/test.sh            all parts
#   bash build/test.sh go tests   these parts: check go boundary tests cases cases-ray, and cases-remote, which takes minutes
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

CASES=$ROOT/../shared/cases
LOGS=$OUT/log
SCRATCH=$(mktemp -d /tmp/tq-test.XXXXXX)
# Every process of this run carries this in its environment, so those that lost their parent are found as well.
export TQ_TEST_RUN=${SCRATCH##*/}

clean_up() {
    local environ pid
    trap - EXIT
    for environ in /proc/[0-9]*/environ; do
        pid=${environ#/proc/}
        pid=${pid%/environ}
        [ "$pid" != $$ ] && grep -qzxF "TQ_TEST_RUN=$TQ_TEST_RUN" "$environ" 2>/dev/null && kill -9 "$pid" 2>/dev/null
    done
    rm -rf "$SCRATCH"
    return 0
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

failed=()
report=()
part() {
    local name=$1 start=$SECONDS status=ok
    shift
    case " $parts " in *" $name "*) ;; *) return 0 ;; esac
    say "$name"
    "$@" || { status=FAILED; failed+=("$name"); }
    report+=("$(printf '%-10s %-6s %4d s' "$name" "$status" $((SECONDS - start)))")
}

# logged <log> <command>...: shows the output and keeps it. The command stays in the foreground and has no pipe: background
# jobs of a script ignore Ctrl-C, and a pipe ends only when the last left-over child does.
logged() {
    local log=$LOGS/$1 status=0 viewer # called by part, where set -e does not act
    shift
    mkdir -p "$LOGS"
    : >"$log"
    tail -n +1 -s 0.1 -f "$log" 2>/dev/null &
    viewer=$!
    "$@" >"$log" 2>&1 || status=$?
    sleep 0.5
    kill "$viewer" 2>/dev/null
    wait "$viewer" 2>/dev/null
    return $status
}

test_go() {
    local status=0
    say "go test without cgo"
    CGO_ENABLED=0 go test -timeout 30m ./core/... || status=1
    say "go test -race"
    CGO_ENABLED=1 go test -race -short -timeout 30m -tags "$GO_TAGS" ./core/... ./capi/... || status=1
    return $status
}

# The header is the contract of the library: any C or C++ compiler has to take it alone.
test_boundary() {
    local status=0 source=$SCRATCH/header.c
    printf '#include "tq.h"\nint main(void) { return (int)tq_abi_version() != TQ_ABI_VERSION; }\n' >"$source"
    gcc -std=c99 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I capi "$source" || status=1
    g++ -std=c++11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I capi -x c++ "$source" || status=1
    gcc -std=c99 -Wall -Werror -I capi "$source" python/transfer_queue/_core.so -o "$SCRATCH/header" &&
        LD_LIBRARY_PATH=python/transfer_queue "$SCRATCH/header" || { echo "a C program cannot use the library"; status=1; }
    return $status
}

test_python() { TMPDIR=$SCRATCH logged tests.log "$PY" -m pytest; }

# run_cases <log> <argument>...: Python writes beside the cases, which may be read-only.
run_cases() {
    [ -d "$CASES" ] || { echo "no acceptance cases beside this checkout"; return 0; }
    rm -rf .out/cases
    mkdir -p .out/cases
    cp -r "$CASES/." .out/cases
    chmod -R u+w .out/cases
    TMPDIR=$SCRATCH logged "$1" "$PY" build/cases.py .out/cases "${@:2}"
}

test_cases() { run_cases cases.log; }

# A local Ray is one machine for itself: its sockets have long names, and it has to bind to loopback.
test_cases_ray() {
    mkdir -p "$SCRATCH/ray"
    RAY_TMPDIR=$SCRATCH/ray RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 TQ_CASES_RUNTIME=ray run_cases cases-ray.log --timeout 120
}

# The cases with their session on other hosts, which are network namespaces; without root they are skipped.
test_cases_remote() {
    rm -rf .out/cases
    mkdir -p .out/cases
    cp -r "$CASES/." .out/cases
    chmod -R u+w .out/cases
    TMPDIR=$SCRATCH logged cases-remote.log "$PY" build/remote_cases.py .out/cases --timeout 120
}

parts="build ${*:-check go boundary tests cases cases-ray}"
rm -rf "$LOGS"
part build build_core
built=${#failed[@]}
part check bash build/check.sh
part go test_go
if [ "$built" = 0 ]; then
    part boundary test_boundary
    part tests test_python
    part cases test_cases
    part cases-ray test_cases_ray
    part cases-remote test_cases_remote
fi

echo
printf '%s\n' "${report[@]}"
[ ${#failed[@]} = 0 ] || echo "failed: ${failed[*]}"
[ "$built" = 0 ] || echo "not run without a library: boundary, tests, cases, cases-ray"
[ -n "$GO_TAGS" ] || echo "not run without libzmq: connections between hosts"
for log in tests cases cases-ray cases-remote; do
    [ ! -s "$LOGS/$log.log" ] || tail -n 1 "$LOGS/$log.log"
done
[ ${#failed[@]} = 0 ]
