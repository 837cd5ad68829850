#!/usr/bin/env bash
# Builds a wheel into .out/dist with the tool chain of this machine. Its platform tag names the oldest glibc it runs on.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
rm -rf .out/dist
"$PY" -m pip wheel -q --no-deps --no-build-isolation -w .out/dist .
ls -l .out/dist
