#!/usr/bin/env bash
# Fuzzes every decoder for a while and keeps what it found: inputs that fail lie in testdata/fuzz afterwards, as Go leaves
# them, and beside them a corpus of at most 24 inputs per fuzzer that reach different code, with which every test run begins.
#
#   bash build/fuzz.sh                       two minutes each
#   bash build/fuzz.sh 600 ./core/wire       so many seconds, these packages
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

seconds=${1:-120}
[ $# -lt 2 ] && set -- "$seconds" ./core/...
failed=()

# keep <package> <fuzzer>: inputs of all sizes out of Go's cache, which are a corpus only on this machine.
keep() {
    local package=$1 fuzzer=$2 found target
    target=$ROOT/${package#transferqueue/}/testdata/fuzz/$fuzzer
    found=$(go env GOCACHE)/fuzz/$package/$fuzzer
    [ -d "$found" ] || return 0
    [ -d "$target" ] && return 0 # of an earlier run; remove it to begin anew
    mkdir -p "$target"
    find "$found" -type f -size -4k -printf '%s %p\n' | sort -n |
        awk '{ file[NR] = $2 } END { step = NR > 24 ? NR / 24 : 1; for (i = 1; i <= NR; i += step) print file[int(i)] }' |
        while read -r file; do cp -n "$file" "$target/"; done
}

while read -r package fuzzer; do
    say "$package $fuzzer"
    go test -tags "$GO_TAGS" -run '^$' -fuzz "^$fuzzer\$" -fuzztime "${seconds}s" \
        -fuzzminimizetime 2s "$package" || { failed+=("$package.$fuzzer"); continue; }
    keep "$package" "$fuzzer"
done < <(go list -tags "$GO_TAGS" -f '{{$p := .}}{{range .TestGoFiles}}{{$p.Dir}}/{{.}} {{$p.ImportPath}}
{{end}}{{range .XTestGoFiles}}{{$p.Dir}}/{{.}} {{$p.ImportPath}}
{{end}}' "${@:2}" | while read -r file package; do
    [ -z "$file" ] || sed -n "s/^func \(Fuzz[A-Za-z]*\)(.*/$(printf '%s' "$package" | sed 's/[\/&]/\\&/g') \1/p" "$file"
done)

[ ${#failed[@]} = 0 ] || { printf 'fuzz: failed: %s\n' "${failed[*]}"; exit 1; }
echo "fuzz: ok"
