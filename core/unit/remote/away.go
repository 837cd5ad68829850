package remote

import (
	"context"
	"net"
	"strconv"
	"strings"
	"time"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// Away reports that the unit is on another host, so that its memory cannot be mapped here.
func (u *Unit) Away() bool {
	_, away := u.conn.(*Line)
	return away
}

// Machine is where the unit's memory can be mapped.
func (u *Unit) Machine() string { return u.at.Machine }

// Address is where and as what the unit was reached.
func (u *Unit) Address() Address { return u.at }

// Cells names what a write has put on a unit.
type Cells struct {
	Partition string
	Fields    []string
	Samples   []schema.Sample
}

func cellsOf(partition string, columns []schema.Column) Cells {
	out := Cells{Partition: partition, Fields: make([]string, len(columns))}
	for i := range columns {
		out.Fields[i] = columns[i].Field
	}
	return out
}

// doubt notes that a commit has no answer.
func (u *Unit) doubt(s *staged) {
	u.state.Lock()
	defer u.state.Unlock()
	u.state.doubts = append(u.state.doubts, s.cells)
}

// Keeps reports that a unit on another host that is lost may go on with the cells that it has in memory, when its process is
// there again: only the network was away. Doubts are the cells of which the unit may have an earlier version instead.
func (u *Unit) Keeps() bool {
	u.state.Lock()
	defer u.state.Unlock()
	return u.Away() && u.state.lost != nil && !u.state.refused
}

// Doubts lists the cells whose commits have had no answer when the unit was lost.
func (u *Unit) Doubts() []Cells {
	u.state.Lock()
	defer u.state.Unlock()
	return u.state.doubts
}

// Ticket asks for a ticket of a payload stream, and says where to show it.
func (u *Unit) Ticket(ctx context.Context) (address string, ticket *wire.UnitTicket, err error) {
	a := u.post(wire.OpUnitTicket, &wire.UnitStatsRequest{}, nil)
	if err := a.wait(ctx); err != nil {
		return "", nil, err
	}
	t := a.reply.Ticket
	if t == nil || t.Port <= 0 || t.Port > 65535 {
		return "", nil, tqerr.New(tqerr.Corruption, "unit %q gave no ticket", u.at.Name)
	}
	host, _, err := net.SplitHostPort(strings.TrimPrefix(u.at.Address, "tcp://"))
	if err != nil {
		return "", nil, tqerr.New(tqerr.InvalidArgument, "unit %q: address %q: %v", u.at.Name, u.at.Address, err)
	}
	return net.JoinHostPort(host, strconv.Itoa(t.Port)), t, nil
}

// granted is what a unit on another host lends under a number.
type granted interface{ grant() (*Unit, uint64) }

func (s *staged) grant() (*Unit, uint64) { return s.u, s.number }
func (l *lease) grant() (*Unit, uint64)  { return l.u, l.number }

// GrantOf is the number by which streams name what is staged on a unit on another host; 0 when there is none.
func GrantOf(s store.Staged) uint64 { return numberOf(s) }

// LeaseGrant is GrantOf for a lease.
func LeaseGrant(l store.Lease) uint64 { return numberOf(l) }

func numberOf(of any) uint64 {
	g, ok := of.(granted)
	if !ok {
		return 0
	}
	u, number := g.grant()
	if !u.Away() {
		return 0
	}
	return number
}

// Receive fills pieces from what is staged or leased under a number, from an offset of its bytes on.
func (u *Unit) Receive(ctx context.Context, number uint64, offset int64, pieces [][]byte) error {
	return u.overLine(ctx, func(l Link) error {
		return l.ReceiveFrom(ctx, transport.Grant{ID: number}, offset, pieces)
	})
}

// Send writes pieces to the memory of a write.
func (u *Unit) Send(ctx context.Context, number uint64, pieces [][]byte) error {
	return u.overLine(ctx, func(l Link) error {
		return l.Send(ctx, transport.Grant{Write: true, ID: number}, 0, pieces)
	})
}

// betweenLinks is how often somebody looks whether there is a connection again.
const betweenLinks = 10 * time.Millisecond

// overLine moves payload, and again when the connection broke and there is another one. The same bytes go to the same places.
func (u *Unit) overLine(ctx context.Context, move func(Link) error) error {
	line, ok := u.conn.(*Line)
	if !ok {
		return tqerr.New(tqerr.Internal, "unit %q is reached without streams", u.at.Name)
	}
	for {
		link, err := line.now()
		if err == nil {
			if err = move(link); err == nil || ctx.Err() != nil || !ended(link) {
				return err
			}
		}
		select {
		case <-line.Done():
			_, err := line.now()
			return tqerr.Wrap(tqerr.Unavailable, err, "unit %q", u.at.Name)
		case <-ctx.Done():
			return unit.Ended(ctx, "moving payload of unit \""+u.at.Name+"\"")
		case <-time.After(betweenLinks):
		}
	}
}
