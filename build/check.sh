#!/usr/bin/env bash
# Format, lint and types: gofmt, go vet, golangci-lint, ruff, mypy. Runs all of them and fails at the end.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

# Builds with Go 1.24 and understands the export data of 1.26. Built once for all checkouts.
LINT_VERSION=v2.8.0

failed=()
step() {
    say "$1"
    "${@:2}" || failed+=("$1")
}

format_go() {
    local files
    files=$(find . -path ./.out -prune -o -name '*.go' -print0 | xargs -0r gofmt -l)
    [ -z "$files" ] || { printf 'gofmt -w is due:\n%s\n' "$files"; return 1; }
}

lint_go() {
    local lint folder
    lint=$CACHE/bin/golangci-lint-$LINT_VERSION-$(go env GOVERSION)
    if [ ! -x "$lint" ]; then
        say "building golangci-lint $LINT_VERSION"
        folder=$(mktemp -d)
        (cd "$folder" && GOBIN=$folder GOFLAGS="" CGO_ENABLED=0 go install -trimpath -ldflags='-s -w' \
            "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$LINT_VERSION" 2>"$folder/log") ||
            { cat "$folder/log"; rm -rf "$folder"; return 1; }
        mkdir -p "$CACHE/bin"
        mv "$folder/golangci-lint" "$lint.$$" && mv "$lint.$$" "$lint"
        rm -rf "$folder"
    fi
    GOLANGCI_LINT_CACHE=$CACHE/lint "$lint" run --allow-parallel-runners --build-tags "$GO_TAGS" ./...
}

banners() {
    ! git grep -nE '^[[:space:]]*(#|//) ?[-=#*]{4,}' -- '*.py' '*.go' '*.sh'
}

step gofmt format_go
step vet go vet ./...
[ -z "$GO_TAGS" ] || step "vet with $GO_TAGS" go vet -tags "$GO_TAGS" ./...
step golangci-lint lint_go
step banners banners
step ruff "$PY" -m ruff check .
step "ruff format" "$PY" -m ruff format --check .
step mypy "$PY" -m mypy

[ ${#failed[@]} = 0 ] || { printf 'check: failed: %s\n' "${failed[*]}"; exit 1; }
echo "check: ok"
