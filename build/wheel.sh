#!/usr/bin/env bash
# Builds wheels into .out/dist that run on other machines than this one, and checks them.
#
#   bash build/wheel.sh                    for x86_64 and aarch64, glibc 2.28 and newer
#   bash build/wheel.sh x86_64             for one of them
#   bash build/wheel.sh --try x86_64       and runs the README's example with it on every Python of this machine
#
# One compiler from the package index, pinned below, makes both without the headers and libraries of either, so that neither
# a container nor an old system is needed. --try installs the dependencies of each Python in the shared cache: torch, gigabytes.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

ZIG=ziglang==0.17.1
GLIBC=2.28
README_SAYS="['a/0', 'a/1'] [[0, 1, 2, 7, 8], [0, 1, 2, 3, 4]] [2.0, 2.0]"

need_zig() {
    zig=$CACHE/${ZIG//==/-}
    [ -x "$zig/bin/python" ] && "$zig/bin/python" -c 'import ziglang' 2>/dev/null && return
    say "installing $ZIG"
    rm -rf "$zig"
    "$CACHE/base/bin/python" -m venv "$zig"
    "$zig/bin/python" -m pip install -q "$ZIG"
}

# tool <folder> <name> <arguments of zig>: a compiler as one word, which everybody understands.
tool() {
    printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$zig/bin/python" "$3" >"$1/$2"
    chmod +x "$1/$2"
}

# build_for <machine>
build_for() {
    local machine=$1 tools=$CACHE/cross-$1-$GLIBC
    local target=$machine-linux-gnu.$GLIBC
    local -A goarch=([x86_64]=amd64 [aarch64]=arm64)
    [ -n "${goarch[$machine]:-}" ] || die "no wheels for $machine, only for ${!goarch[*]}"
    say "wheel for $machine"
    mkdir -p "$tools"
    tool "$tools" cc "cc -target $target"
    tool "$tools" c++ "c++ -target $target"
    tool "$tools" ar ar
    (
        export CC=$tools/cc CXX=$tools/c++ AR=$tools/ar GOARCH=${goarch[$machine]} TQ_CXX_RUNTIME=-lc++
        TQ_LIBZMQ=$("$CACHE/base/bin/python" build/libzmq.py)
        export TQ_LIBZMQ PKG_CONFIG=$ROOT/build/pkg-config CGO_CFLAGS="-O2 -g0" CGO_CXXFLAGS="-O2 -g0"
        "$PY" -m pip wheel -q --no-deps --no-build-isolation -w .out/dist .
    )
}

# pythons: each working Python that the package supports, once per version.
pythons() {
    local python
    for python in "${HOME:-/root}"/.pyenv/versions/3.*/bin/python3 /usr/bin/python3.[0-9] /usr/bin/python3.[0-9][0-9] python3; do
        "$python" -c 'import sys, ensurepip, venv; v = sys.version_info; assert v >= (3, 10); print("%d.%d" % v[:2], sys.executable)' \
            2>/dev/null || true
    done | sort -u -k 1,1
}

# try_on <version> <python> <wheel>: in an environment that sees only the wheel and its dependencies, and no Go or compiler.
try_on() {
    local version=$1 python=$2 wheel=$3 deps=$CACHE/python-$1 venv=$OUT/try-$1 said
    if ! "$deps/bin/python" -c 'import torch, tensordict, msgspec, cloudpickle, omegaconf' 2>/dev/null; then
        say "dependencies for Python $version"
        "$python" -m venv --clear "$deps"
        "$deps/bin/python" -m pip install -q torch tensordict numpy msgspec cloudpickle omegaconf || return
    fi
    "$python" -m venv --clear --without-pip "$venv"
    "$deps/bin/python" - "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deps.pth" <<'PYTHON'
import pathlib, sys, sysconfig
pathlib.Path(sys.argv[1]).write_text(sysconfig.get_path("purelib") + "\n")
PYTHON
    "$deps/bin/python" -m pip -q --python "$venv/bin/python" install --no-deps --no-index "$wheel"
    said=$(cd / && env -i PATH="$venv/bin" HOME="$SCRATCH" TQ_RUNTIME_DIR="$SCRATCH/$version" "$venv/bin/python" - <<PYTHON
import shutil
assert not [name for name in ("go", "gcc", "cc", "g++") if shutil.which(name)]
$(sed -n '/^```python$/,/^```$/{/^```/d;p}' "$ROOT/README.md")
PYTHON
    )
    rm -rf "$venv"
    [ "${said%%$'\n'*}" = "$README_SAYS" ] || { echo "Python $version printed: $said"; return 1; }
    echo "Python $version: the README's example ran"
}

try=
[ "${1:-}" = --try ] && try=1 && shift
[ $# -gt 0 ] || set -- x86_64 aarch64
need_zig
rm -rf .out/dist
for machine in "$@"; do build_for "$machine"; done
"$PY" build/check_wheel.py .out/dist/*.whl
[ -n "$try" ] || exit 0
SCRATCH=$(mktemp -d /tmp/tq-wheel.XXXXXX)
trap 'rm -rf "$SCRATCH"' EXIT
status=0
while read -r version python; do
    try_on "$version" "$python" "$ROOT"/.out/dist/*_"$(uname -m)".whl || { echo "Python $version: FAILED"; status=1; }
done < <(pythons)
exit $status
