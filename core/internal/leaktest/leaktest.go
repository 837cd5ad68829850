// Package leaktest fails a test that leaves goroutines or descriptors behind.
package leaktest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"sort"
	"strings"
	"testing"
	"time"
)

// patience is how long what is ending may take to end on a busy machine.
var patience = 10 * time.Second

// Check remembers the goroutines and descriptors of now and compares when the test ends, after the cleanups that the
// test registers later. Not for tests that run in parallel with others of their package.
func Check(t testing.TB) {
	t.Helper()
	openPoller(t)
	before := take()
	t.Cleanup(func() {
		if left := wait(before, patience); len(left) > 0 {
			t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
		}
	})
}

// openPoller makes the runtime open the descriptors of its network poller now, which it keeps for ever.
func openPoller(t testing.TB) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	_ = w.Close()
}

// wait looks again and again, at growing distances, until nothing is left or its time is over.
func wait(before map[string]string, patience time.Duration) []string {
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		left := extra(before, take())
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		time.Sleep(pause)
	}
}

func extra(before, after map[string]string) (left []string) {
	for key, text := range after {
		if _, known := before[key]; !known {
			left = append(left, text)
		}
	}
	sort.Strings(left)
	return left
}

// take lists what a test can leave behind: a key that is never used twice, and a text for people.
func take() map[string]string {
	found := map[string]string{}
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	for _, stack := range strings.Split(string(stacks), "\n\n") {
		id := goroutineID.FindString(stack)
		if id != "" && !ours(stack) {
			found[id] = stack
		}
	}
	// The listing itself opens a descriptor, which is gone when it is looked at.
	entries, _ := filepath.Glob("/proc/self/fd/*")
	for _, entry := range entries {
		if target, err := os.Readlink(entry); err == nil {
			text := fmt.Sprintf("descriptor %s -> %s", filepath.Base(entry), target)
			found[text] = text
		}
	}
	return found
}

var goroutineID = regexp.MustCompile(`^goroutine \d+`)

// ours tells goroutines of the test framework and the caller itself from those of the code under test.
func ours(stack string) bool {
	for _, name := range []string{"leaktest.take(", "testing.(*T).Run(", "testing.(*M).", "testing.runTests(", "runtime.goexit0"} {
		if strings.Contains(stack, name) {
			return true
		}
	}
	return false
}
