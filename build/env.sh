# shellcheck shell=bash
# Sourced by the other scripts of this folder: finds or installs everything a build, a test run or the demo needs.
#
# Afterwards $PY is a Python that has the dependencies, and after build_core this checkout too; go is in PATH; and $ROOT,
# $OUT, $CACHE are the checkout, its ignored outputs, and what all checkouts of a user share ($TQ_CACHE, or transferqueue
# in $XDG_CACHE_HOME or ~/.cache): one environment with torch and the tools, gigabytes large, which is filled once. A
# second run compares stamps and is done.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OUT=$ROOT/.out
if [ ! -w "${HOME:=/root}" ]; then # Go, pip and the cache need one
    HOME=$OUT/home
    mkdir -p "$HOME"
fi
export HOME
CACHE=${TQ_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/transferqueue}
PY=$OUT/venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# apt_install <what for> <package>...
apt_install() {
    local purpose=$1
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "$purpose is missing. As root: apt-get install $*"
    fi
    say "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2 || say "apt-get update failed, trying with the lists at hand"
    apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "$@" >/dev/null || die "apt-get install $* failed"
}

need_system() {
    local packages=()
    echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 || packages+=(gcc libc6-dev)
    echo '#include <cstdlib>' | g++ -x c++ -E - >/dev/null 2>&1 || packages+=(g++)
    command -v git >/dev/null || packages+=(git)
    [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -n "${SSL_CERT_FILE:-}" ] || packages+=(ca-certificates)
    [ ${#packages[@]} = 0 ] || apt_install "a part of the tool chain" "${packages[@]}"
}

# at_least <have> <wanted>, both dotted versions
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Puts the first Go that is new enough for go.mod in PATH, or fails and leaves in go_found what there is.
find_go() {
    local wanted=$1 go version
    go_found=
    for go in "$(command -v go || true)" /usr/local/go/bin/go; do
        [ -x "$go" ] || continue
        version=$(cd "$ROOT" && "$go" version 2>/dev/null | sed -n 's/.* go\([0-9.]*\).*/\1/p')
        if [ -n "$version" ] && at_least "$version" "$wanted"; then
            PATH=$(dirname "$go"):$PATH
            export PATH
            return
        fi
        go_found+=" $go is ${version:-broken};"
    done
    return 1
}

need_go() {
    local wanted candidate
    wanted=$(sed -n 's/^go \([0-9.]*\)$/\1/p' "$ROOT/go.mod")
    find_go "$wanted" && return
    # Debian's is new enough from 13 on, Ubuntu's from 25.04.
    candidate=$(apt-cache policy golang-go 2>/dev/null | sed -n 's/^ *Candidate: \([0-9]:\)\?\([0-9.]*\).*/\2/p')
    if [ "$(id -u)" = 0 ] && [ -n "$candidate" ] && at_least "$candidate" "$wanted"; then
        apt_install Go golang-go
        find_go "$wanted" && return
    fi
    die "Go $wanted or newer is needed:${go_found:- there is none in PATH or /usr/local/go/bin;}" \
        "unpack the archive of https://go.dev/dl/ in /usr/local, which makes /usr/local/go"
}

# Prints the first Python that torch has wheels for.
find_python() {
    local python
    for python in python3.11 python3.12 python3.13 python3.14 python3; do
        if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    return 1
}

fingerprint() { cat "$@" | sha256sum | cut -c 1-16; }

# The shared environment. Checkouts that start at the same time wait for each other here.
need_base() {
    local base=$CACHE/base python stamp
    stamp=$(fingerprint "$ROOT/build/requirements.txt")
    [ "$(cat "$base/stamp" 2>/dev/null)" = "$stamp" ] && "$base/bin/python" -c '' 2>/dev/null && return
    mkdir -p "$CACHE"
    exec 9>"$CACHE/lock"
    flock 9
    if ! "$base/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || {
            [ "$(id -u)" = 0 ] && ! command -v python3 >/dev/null && apt_install Python python3 python3-venv
            python=$(find_python) || die "Python 3.11 to 3.14 is needed: torch has wheels for no other"
        }
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            apt_install "the module venv of $python" \
                "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        say "environment for all checkouts: $base ($("$python" --version))"
        rm -rf "$base"
        "$python" -m venv "$base"
    fi
    if [ "$(cat "$base/stamp" 2>/dev/null)" != "$stamp" ]; then
        say "installing build/requirements.txt (the first time: torch, some gigabytes)"
        "$base/bin/python" -m pip install -q -r "$ROOT/build/requirements.txt" >&2 || die "pip install failed"
        echo "$stamp" >"$base/stamp"
    fi
    exec 9>&-
}

# The checkout's own environment, which sees the shared one.
need_venv() {
    local base=$CACHE/base stamp
    stamp=$(printf '%s\n' "$base" "$("$base/bin/python" --version)" | fingerprint)
    [ "$(cat "$OUT/venv/stamp" 2>/dev/null)" = "$stamp" ] && "$PY" -c '' 2>/dev/null && return
    mkdir -p "$OUT"
    "$base/bin/python" -m venv --clear --without-pip "$OUT/venv"
    "$base/bin/python" - "$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth" <<'PYTHON'
import pathlib, sys, sysconfig
pathlib.Path(sys.argv[1]).write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
PYTHON
    echo "$stamp" >"$OUT/venv/stamp"
}

# Builds python/transfer_queue/_core.so, where Go decides whether there is anything to do, and installs the checkout in place.
build_core() {
    local stamp
    stamp=$(cd "$ROOT" && fingerprint setup.py setup.cfg pyproject.toml python/transfer_queue/version/version)
    if [ "$(cat "$OUT/venv/installed" 2>/dev/null)" = "$stamp" ]; then
        (cd "$ROOT" && "$PY" setup.py -q build_ext --inplace >&2)
        return
    fi
    say "installing this checkout into $OUT/venv"
    "$PY" -m pip install -q --no-deps --no-build-isolation -e "$ROOT" >&2 || return
    echo "$stamp" >"$OUT/venv/installed"
}

# libzmq for cgo: a static one, the system's with TQ_LIBZMQ=system, or none, and GO_TAGS for what there is. When the source of
# the static one cannot be had, what is built is one that serves a single host, as in setup.py. The name of its folder, a hash
# of source and flags, is in CGO_CFLAGS because Go's cache does not see what pkg-config prints.
need_libzmq() {
    local key=0
    case ${TQ_LIBZMQ:-} in
    none) ;;
    system) [ -e /usr/include/zmq.h ] || apt_install "libzmq" libzmq3-dev ;;
    *)
        if ! TQ_LIBZMQ=$("$CACHE/base/bin/python" "$ROOT/build/libzmq.py"); then
            TQ_LIBZMQ=none
            [ ! -e /usr/include/zmq.h ] || TQ_LIBZMQ=system
            say "no static libzmq, going on with: $TQ_LIBZMQ"
        fi
        ;;
    esac
    export TQ_LIBZMQ GO_TAGS=zmq PKG_CONFIG=$ROOT/build/pkg-config
    case $TQ_LIBZMQ in
    none) GO_TAGS='' && say "without libzmq: sessions serve one host, and what needs it is neither built nor tested" && return ;;
    /*) key=${TQ_LIBZMQ##*-} ;;
    esac
    case " ${CGO_CFLAGS:=-g -O2} " in
    *" -DTQ_LIBZMQ_KEY=0x$key "*) ;; # of a script that has called this one
    *) CGO_CFLAGS+=" -DTQ_LIBZMQ_KEY=0x$key" ;;
    esac
    export CGO_CFLAGS
}

need_system
need_go
need_base
need_venv
need_libzmq
