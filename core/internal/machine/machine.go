// Package machine tells hosts apart. Processes with the same ID may reach each other's unix sockets, which only trying tells:
// containers of one machine have one kernel and perhaps no directory in common. Processes with different ones never do.
package machine

import (
	"os"
	"strings"
	"sync"
	"sync/atomic"
)

// Variable is the environment variable that replaces what the machine says, to make one host look like several.
const Variable = "TQ_HOST_ID"

// maxID bounds what the variable may have, since it travels in the greeting of every connection.
const maxID = 128

var used atomic.Pointer[string]

// Use replaces what the variable says, which a library does not see when its program sets it; "" goes back to that.
func Use(id string) { used.Store(&id) }

// ID is the identity of the boot of this machine's kernel, else the host's name.
func ID() string {
	given := os.Getenv(Variable)
	if id := used.Load(); id != nil && *id != "" {
		given = *id
	}
	if given != "" {
		return given[:min(len(given), maxID)]
	}
	return booted()
}

var booted = sync.OnceValue(func() string {
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		return strings.TrimSpace(string(id))
	}
	name, _ := os.Hostname()
	return name[:min(len(name), maxID)]
})
