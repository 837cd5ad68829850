package session_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// asUnit is the configuration of a unit beside a session.
func asUnit(cfg *session.Config, name string) *session.Config {
	return in(cfg, func(c *session.Config) { c.Mode, c.Name, c.Blob, c.Listen, c.PayloadPort = "unit", name, nil, "", 0 })
}

// join makes units in other processes known to a session.
func join(s *session.Session, units ...*process) error {
	var req wire.JoinUnitsRequest
	for _, p := range units {
		req.Units = append(req.Units, wire.UnitAddress{Name: p.name(), Socket: p.Info.Socket, Secret: p.Info.Secret, Host: "h"})
	}
	return ask(s, wire.OpJoinUnits, &req, nil)
}

func (p *process) name() string {
	for _, entry := range p.cmd.Env {
		if _, rest, found := strings.Cut(entry, `"Name":"`); found {
			name, _, _ := strings.Cut(rest, `"`)
			return name
		}
	}
	return ""
}

func states(t *testing.T, s *session.Session) map[string]string {
	t.Helper()
	var reply wire.UnitsReply
	require.NoError(t, ask(s, wire.OpUnits, nil, &reply))
	out := map[string]string{}
	for _, u := range reply.Units {
		out[u.ID] = u.State
	}
	return out
}

func TestUnitsInOtherProcesses(t *testing.T) {
	leaktest.Check(t)
	cfg := in(config(t), func(c *session.Config) { c.Units = -1 })
	owner, mem := open(t, cfg), foreigntest.New(t, 32<<20)
	attached := open(t, mode(cfg, "attach"))
	unit := spawn(t, asUnit(cfg, "unit-a"))()
	require.Empty(t, unit.Err)
	require.NoError(t, join(attached, unit))
	require.NoError(t, join(owner, unit), "again")
	require.Equal(t, map[string]string{"unit-a": "ACTIVE"}, states(t, owner))

	big := make([]int64, 1<<18)
	for i := range big {
		big[i] = int64(i)
	}
	put(t, attached, wire.Strings{"small"}, mem.Ints([]int64{2}, 7, 8))
	require.Len(t, get(t, owner, wire.Strings{"small"}, 0), 16)
	for _, flags := range []client.Flags{0, client.Views} {
		put(t, owner, wire.Strings{"big"}, mem.Ints([]int64{1 << 18}, big...))
		data := get(t, attached, wire.Strings{"big"}, flags)
		require.Len(t, data, 1<<21)
		require.Equal(t, []byte{0xff, 0xff, 3}, data[len(data)-8:len(data)-5])
	}

	require.NoError(t, unit.cmd.Process.Kill())
	require.Eventually(t, func() bool { return states(t, owner)["unit-a"] == "UNAVAILABLE" }, 10*time.Second, time.Millisecond)
	err := ask(owner, wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: wire.Strings{"big", "small"}}, nil)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "unit-a")
	require.NoError(t, ask(owner, wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: wire.Strings{"big", "small"}}, nil))

	fresh := spawn(t, asUnit(cfg, "unit-a"))()
	require.NoError(t, join(owner, fresh))
	put(t, attached, wire.Strings{"small"}, mem.Ints([]int64{2}, 7, 8))
	require.Len(t, get(t, owner, wire.Strings{"small"}, 0), 16)
	require.NotEmpty(t, owner.Descriptors())
	fresh.close(t)
}

// The socket of a unit belongs to the runtime directory as that of a session does, but outlives sessions.
func TestSocketsOfUnits(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	first, second := spawn(t, asUnit(cfg, "a"))(), spawn(t, asUnit(cfg, "b"))()
	require.NotEqual(t, first.Info.Socket, second.Info.Socket)
	require.NotEmpty(t, first.Info.Secret)
	require.Len(t, files(t, cfg.Dir), 2)
	first.close(t)
	require.Equal(t, []string{filepath.Base(second.Info.Socket)}, files(t, cfg.Dir))
	owner := open(t, cfg)
	require.Contains(t, files(t, cfg.Dir), filepath.Base(second.Info.Socket), "its process runs")
	require.NoError(t, owner.Close(time.Second))
	require.NoError(t, second.cmd.Process.Kill())
	_ = second.cmd.Wait()
	require.Contains(t, files(t, cfg.Dir), filepath.Base(second.Info.Socket))
	third := open(t, asUnit(cfg, "c"))
	require.Equal(t, []string{"default.lock", filepath.Base(third.Info.Socket)}, files(t, cfg.Dir))
	require.Nil(t, third.Client)
	require.NotNil(t, third.Jobs)
	require.NotEmpty(t, third.Descriptors())
}

func TestBadUnits(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	for name, change := range map[string]func(*session.Config){
		"no name":      func(c *session.Config) { c.Name = "" },
		"a long name":  func(c *session.Config) { c.Name = strings.Repeat("n", 300) },
		"less than no": func(c *session.Config) { c.MemoryLimit = -1 },
		"no sample":    func(c *session.Config) { c.SampleLimit = -1 },
	} {
		_, err := session.Open(t.Context(), in(asUnit(cfg, "u"), change))
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
	}
	require.Empty(t, files(t, cfg.Dir))
	owner := open(t, cfg)
	for name, at := range map[string]wire.UnitAddress{
		"no socket": {Name: "u", Secret: []byte("s")},
		"no secret": {Name: "u", Socket: "/s"},
		"no name":   {Socket: "/s", Secret: []byte("s")},
	} {
		err := ask(owner, wire.OpJoinUnits, &wire.JoinUnitsRequest{Units: []wire.UnitAddress{at}}, nil)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
	}
	err := ask(owner, wire.OpJoinUnits, &wire.JoinUnitsRequest{Units: []wire.UnitAddress{{Name: "unit-0", Socket: "/s", Secret: []byte("s")}}}, nil)
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err), "a name of the owner's own process")
}
