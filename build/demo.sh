#!/usr/bin/env bash
# Sets up, builds, and runs the main job: bash build/demo.sh [options of tutorial/grpo_demo.py]
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
build_core
exec "$PY" "$ROOT/tutorial/grpo_demo.py" "$@"
