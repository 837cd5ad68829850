package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFilesAreUpToDate(t *testing.T) {
	for name, want := range files() {
		got, err := os.ReadFile(filepath.Join("../../..", name))
		require.NoError(t, err)
		require.Equal(t, want, string(got), "%s is out of date: run go generate ./core/tqerr", name)
	}
}

func TestUpper(t *testing.T) {
	for name, want := range map[string]string{
		"OK": "OK", "IO": "IO", "InvalidArgument": "INVALID_ARGUMENT", "NotFound": "NOT_FOUND", "reset_consumption": "RESET_CONSUMPTION",
	} {
		require.Equal(t, want, upper(name))
	}
}
