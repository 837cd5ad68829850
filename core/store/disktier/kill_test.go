package disktier

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
)

const killFolder = "TQ_DISKTIER_KILL_FOLDER"

// TestKillChild is the process that TestRealKill kills: it does random things and says what it is about to do and what it
// has done, until it dies.
func TestKillChild(t *testing.T) {
	dir := os.Getenv(killFolder)
	if dir == "" {
		t.Skip("runs as the child of TestRealKill")
	}
	seed, err := strconv.ParseUint(os.Getenv("TQ_DISKTIER_KILL_SEED"), 10, 64)
	require.NoError(t, err)
	s, err := OpenStore(killOptions(dir), memory(t), 0)
	require.NoError(t, err)
	c := newCrasher(t, s, seed)
	for step := 0; ; step++ {
		fmt.Printf("begin %d\n", step)
		require.NoError(t, c.step())
		fmt.Printf("done %d\n", step)
	}
}

func killOptions(dir string) Options {
	return Options{Dir: dir, Durability: Relaxed, SegmentBytes: 256 << 10, HeadroomBytes: testHeadroom, grow: 8 << 10}
}

// TestRealKill kills a process at random points of its work. The same steps, done by a store in memory, say what the folder
// may hold: the state before or after the step that was interrupted.
func TestRealKill(t *testing.T) {
	for range 25 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 5))
			dir := filepath.Join(t.TempDir(), "tier")
			begun, done := runAndKill(t, dir, seed, rnd.IntN(300))
			model, err := OpenStore(testOptions(None, vfs.NewMem(0)), memory(t), 0)
			require.NoError(t, err)
			c := newCrasher(t, model, seed)
			for range done {
				require.NoError(t, c.step())
			}
			if begun > done {
				c.unacknowledged = true
				require.NoError(t, c.step())
			}
			s, err := OpenStore(killOptions(dir), memory(t), 0)
			require.NoError(t, err)
			require.NoError(t, s.Check())
			require.NoError(t, c.readAll(s, true))
			require.Equal(t, s.Stats().DiskUsed, s.Tier().Usage().Live)
			require.NoError(t, s.Close())
			require.NoError(t, model.Close())
		})
	}
}

// runAndKill runs the child until it has begun so many steps, and kills it a little later.
func runAndKill(t *testing.T, dir string, seed uint64, steps int) (begun, done int) {
	cmd := exec.Command(os.Args[0], "-test.run", "^TestKillChild$", "-test.v")
	cmd.Env = append(os.Environ(), killFolder+"="+dir, fmt.Sprint("TQ_DISKTIER_KILL_SEED=", seed))
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	for lines := bufio.NewScanner(out); lines.Scan(); {
		what, number, _ := strings.Cut(lines.Text(), " ")
		n, err := strconv.Atoi(number)
		switch {
		case err != nil:
		case what == "begin":
			begun = n + 1
			if n == steps {
				require.NoError(t, cmd.Process.Kill())
			}
		case what == "done":
			done = n + 1
		}
	}
	require.ErrorContains(t, cmd.Wait(), "killed")
	return begun, done
}
