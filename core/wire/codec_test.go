package wire

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// uniform is a column of rows of one shape.
func uniform(field string, rows int, shape ...int64) Column {
	return Column{Field: field, Kind: schema.Tensor, DType: schema.Float32, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: shape}
}

func keys(n int) Strings {
	out := make(Strings, n)
	for i := range out {
		out[i] = fmt.Sprintf("rollout-%06d", i)
	}
	return out
}

// samples has one filled value of every message and of every form of a column.
func samples() []any {
	text, pointed := "train_7", "p"
	varying := Column{Field: "ids", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: 3, Form: schema.Varying,
		Shape: []int64{0, 4}, Lengths: []int64{1, 0, 7}}
	free := Column{Field: "any", Kind: schema.Tensor, DType: schema.Bool, Ragged: 1, Rows: 2, Form: schema.Free,
		NDims: []uint8{1, 2}, Dims: []int64{3, 4, 5}}
	objects := Column{Field: "text", Kind: schema.Object, Rows: 2, Form: schema.Objects, Codecs: []schema.Codec{1, 200}, Sizes: []int64{9, 0}}
	shared := objects
	shared.Share = []uint32{0, 1, 1, 0}
	named := &Samples{Indexes: Ints{5, -1}, Generations: Ints{1, 2}}
	tag := List{{0x81, 0xa1, 'a', 0x01}, {0x80}}
	unit := UnitInfo{ID: "u0", State: "UP", Host: "h", MemoryUsed: 1 << 40, Leases: 3}
	return []any{
		&ErrorBody{Op: "put", Msg: "partition \"ä\""},
		&Samples{Indexes: Ints{1}, Generations: Ints{}},
		&PutRequest{Partition: text, Keys: keys(3), Columns: []Column{uniform("logits", 3, 8), varying, free, objects},
			Tags: tag, Update: true, Merge: "add", Callable: []byte{0, 1}, Inline: true},
		&PutRequest{Samples: named, Insert: 77, Columns: []Column{}},
		&PutRequest{Columns: []Column{uniform("x", 2, 8)}, Shared: []Sharing{{Column: 0, Rows: Ints{0, 0}}}, Dedup: Strings{"x"}},
		&PutReply{Txn: 1, Parts: []Part{{Rows: Ints{0, 3}}}, Shared: []PartRows{{Part: 0, Column: 2, Rows: Ints{0, 1}}}},
		&UnitStageRequest{Txn: 1, Columns: []Column{shared}},
		&PutReply{Txn: 1 << 63, Parts: []Part{{Unit: 1, Rows: Ints{0, 3}, Blocks: []Block{{Segment: 1, Offset: 1 << 33, Size: 96}, {}}}}},
		&PutReply{Result: &PutResult{Indexes: Ints{9}, Generations: Ints{1}, Fields: Strings{"a"}, Tags: tag, Columns: []Column{varying}}},
		&TxnRequest{Txn: 300},
		&GetRequest{Partition: text, Keys: Strings{}, Fields: nil, Strict: true, Views: true, Inline: 70000},
		&GetReply{Rows: 3, Lease: 7, Grants: []UnitGrant{{Unit: 4, ID: 5}}, Columns: []GetColumn{{Column: free, Runs: []Run{{Rows: 2, Unit: 1, Block: Block{Offset: 64, Size: 12}}}, Lease: 9}}},
		&ReleaseRequest{Leases: Ints{1, 1 << 62}},
		&ClearRequest{Partition: text, Samples: named, Fields: Strings{"x"}},
		&PartitionRequest{Partition: text},
		&ListRequest{Partition: &pointed, Keys: keys(1), Prefix: "r", Tags: []byte{0x80}},
		&ListReply{Partitions: []ListedPartition{{Name: text, Keys: keys(2), Tags: tag}}},
		&WaitRequest{Partition: text, Count: -4, Tags: []byte{}},
		&WaitReply{Keys: keys(2), Tags: tag, Fields: Strings{"a", "b"}},
		&WatchReply{Watch: 1}, &WatchRequest{Watch: 2},
		&EventsReply{Events: []Event{{Kind: "put", Key: "k", Fields: Strings{"a"}, Tags: []byte{0x80}}, {Kind: "clear", Key: "k"}}},
		&MetaRequest{Partition: text, Mode: "fetch", Fields: Strings{"a"}, BatchSize: 1 << 20, Task: "t", Sampling: []byte{0x80}},
		&RetrieveMetaRequest{Partition: text, Keys: keys(2), Create: true},
		&MetaReply{Indexes: Ints{1}, Generations: Ints{1}, Columns: []Column{{Field: "registered", Rows: 1}}, Status: []byte{1}, Tags: List{nil}[:0]},
		&IndexesRequest{Partition: text, Indexes: Ints{1}},
		&KeysReply{Keys: Strings{""}, Known: []byte{0}},
		&SetTagsRequest{Partition: text, Samples: *named, Tags: tag},
		&TaskRequest{Partition: text, Task: "t"},
		&ProductionRequest{Partition: text, Fields: Strings{"a"}},
		&StatusReply{Known: true, Indexes: Ints{1}, Width: 1, Status: []byte{1}},
		&ProgressReply{Known: true, Samples: 2, Consumed: 1},
		&NamesReply{Names: Strings{"a"}},
		&UnitsReply{Units: []UnitInfo{unit}},
		&ConfigReply{Config: []byte{0x80}, Session: "00ff", PID: 3, Host: "h"},
		&StoreConfigRequest{Config: []byte{1}},
		&CreatedReply{Created: true},
		&SnapshotReply{Known: true, Samples: *named, Tags: tag, Reserved: Ints{4}, Keys: keys(2), KeyIndexes: Ints{5, -1},
			Fields: []SnapshotField{{Holders: Ints{5}, Column: varying}}, Tasks: []SnapshotTask{{Task: "t", Consumed: Ints{5}}}},
		&StatusSummary{Version: "1", PID: 3, Uptime: 1 << 31, Units: []UnitInfo{unit},
			Partitions: []PartitionSummary{{Name: "a", Samples: 1, Fields: Strings{"f"}, Consumed: Ints{1}}}},
		&MetricsReply{Uptime: 1 << 40, Resident: 1 << 30, Allocated: 3, Reusable: 1,
			Requests:   []RequestMetrics{{Type: "KV_LIST", Errors: 1, Sum: 1 << 50, Buckets: Ints{1, 0, 2}, P99: 7}},
			Partitions: []PartitionMetrics{{Name: text, Samples: 3, Produced: 1, Tasks: Strings{"t"}, Consumed: Ints{2}}},
			Units:      []UnitMetrics{{Info: unit, Resident: 4096, Requests: []RequestMetrics{{Type: "GET_DATA", Arrived: 5}}}},
			Queues:     QueueMetrics{Clients: 1, Waiters: 2, Watches: 3, Writes: 4, WaitingPuts: 5, Jobs: 6}, Bounds: Ints{1, 5},
			Moves: MoveMetrics{Samples: 1, Cells: 2, Bytes: 3, Drains: 4}},
		&DrainRequest{Unit: "u", Targets: Strings{"v"}, MaxSlots: 1, MaxBytes: 2, Rate: 3, DeadlineMS: 4, Attempts: 5, Tiers: "disk", DryRun: true},
		&UncordonRequest{Unit: "u"}, &JobRequest{Job: 1 << 63, Wait: true, Cancel: true},
		&JobReply{Job: 1, Unit: "u", State: "RUNNING", Phase: "copying", Memory: JobTier{1, 2, 3, 4, 5, 6}, Disk: JobTier{5, 6, 7, 8, 9, 10}, Dropped: 1, Failed: 2,
			Remain: 3, Attempts: 4, Blocked: []JobBlocked{{"PINNED", 1}}, ElapsedMS: 5, ETAMS: -1, Err: text,
			Cells: []JobCell{{Partition: text, Key: "k", Keyed: true, Index: 1, Field: "x", Attempts: 3, Reason: "r"}}},
		&MoveRequest{Partition: text, Keys: Strings{}, To: "u"}, &RebalanceRequest{DryRun: true},
		&MoveReply{Moved: []Moved{{From: "u", To: "v", Samples: 1, Cells: 2, Bytes: 3}}},
		&JoinUnitsRequest{Units: []UnitAddress{{Name: "u", Socket: "/run/u.sock", Secret: []byte{1}, Host: "h", Address: "tcp://h:1", Machine: "m", Key: []byte{2}}}},
		&ReachUnitRequest{Unit: 2, Ticket: true},
		&ReachUnitReply{Name: "u", Machine: "m", Socket: "/s", Secret: []byte{1}, Streams: "h:2", Ticket: []byte{3}, Pin: []byte{4}},
		&UnitOpenRequest{Session: 1 << 63, Keep: true, Resume: true}, &UnitSettleRequest{Leases: true},
		&UnitStageRequest{Txn: 1, Partition: text, Columns: []Column{varying}, Filled: true},
		&UnitCommitRequest{Txn: 1, Samples: *named},
		&UnitReadRequest{Lease: 9, Partition: text, Fields: Strings{"a"}, Samples: *named, Apart: true, Inline: 1 << 16, Keep: true},
		&UnitDeleteRequest{Partition: text, Fields: Strings{}, Samples: *named},
		&UnitTransformRequest{Txn: 2, Partition: text, Samples: *named, Keys: keys(2), Rows: 2, Columns: []Column{objects}, Operand: 1,
			Update: true, Merge: "add", Callable: []byte{0}, WaitMS: 30000},
		&UnitStatsRequest{Wait: true, Memory: 1, Disk: 2},
		&UnitAdviseRequest{Question: 7, Uses: []byte{0, 2}},
		&UnitPrepareRequest{Txn: 3, Shed: true},
		&UnitPieceRequest{Lease: 4, Column: 1, Offset: 1 << 40, Size: 4096, Sum: 1<<32 - 1},
		&UnitInventoryRequest{From: 3},
		&UnitDiscardRequest{Session: 1 << 63},
		&UnitReply{Stock: []UnitStock{{Partition: text, Column: free, Samples: *named}}, More: 4},
		&LostRequest{Partition: &text},
		&LostReply{Cells: []LostCells{{Partition: text, Field: "x", Indexes: Ints{1, 2}, Keys: keys(2), Known: []byte{1, 0}}}},
		&UnitReply{Sum: 7, Question: &UnitQuestion{Number: 7, Partition: text, Samples: *named}},
		&UnitReply{Stats: UnitStats{Count: 3, MemoryUsed: 1 << 40, Leases: 2, Scratch: 5, Disk: UnitDisk{Cells: 1, Fallback: 6}}, Blocks: []Block{{Segment: 1, Size: 8}}, Filled: true,
			Columns: []UnitColumn{{Column: free, Runs: []UnitRun{{Rows: 2, Block: Block{Offset: 64, Size: 12}}}}, {Column: Column{Field: "none"}}},
			Missing: &MissingCell{Field: "x", Index: 4, Generation: 7, Stale: true}, Writes: true,
			Damaged: &DamagedCell{Field: "x", Index: 4, Generation: 7, Cause: "its checksum differs"},
			Ticket:  &UnitTicket{Port: 1, Ticket: []byte{2}, Pin: []byte{3}},
			Opened:  &UnitOpened{Name: "u", Incarnation: 5, PID: 9, SampleLimit: 100}},
	}
}

func TestEveryMessageComesBackAsItWas(t *testing.T) {
	seen := map[string]bool{}
	for _, message := range samples() {
		name := reflect.TypeOf(message).Elem().Name()
		seen[name] = true
		raw, err := Marshal(message)
		require.NoError(t, err, name)
		fromValue, err := Marshal(reflect.ValueOf(message).Elem().Interface())
		require.NoError(t, err, name)
		require.Equal(t, raw, fromValue, name)
		back := reflect.New(reflect.TypeOf(message).Elem()).Interface()
		require.NoError(t, Unmarshal(raw, back), name)
		require.Equal(t, message, back)
	}
	// Messages inside messages are covered with them.
	for _, inner := range []string{"Part", "Block", "PutResult", "GetColumn", "Run", "ListedPartition", "Event", "UnitInfo", "PartitionSummary", "Sharing", "PartRows",
		"UnitAddress", "UnitStats", "UnitColumn", "UnitRun", "MissingCell", "DamagedCell", "UnitDisk", "UnitOpened", "UnitQuestion", "UnitStock", "LostCells",
		"UnitTicket", "UnitGrant"} {
		seen[inner] = true
	}
	for _, name := range declared(t) {
		require.True(t, seen[name], "message %s has no sample", name)
	}
}

// declared lists all messages: the structs but Request and Reply, which are frames around one.
func declared(t *testing.T) (names []string) {
	for _, path := range []string{"messages.go", "units.go"} {
		names = append(names, declaredIn(t, path)...)
	}
	return names
}

func declaredIn(t *testing.T, path string) (names []string) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.TypeSpec); ok {
			if _, ok := spec.Type.(*ast.StructType); ok && spec.Name.Name != "Request" && spec.Name.Name != "Reply" {
				names = append(names, spec.Name.Name)
			}
		}
		return true
	})
	require.NotEmpty(t, names)
	return names
}

func TestOpNamesFollowTheConstants(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "messages.go", nil, 0)
	require.NoError(t, err)
	want := []string{""}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if ok && strings.HasPrefix(spec.Names[0].Name, "Op") {
			name := ""
			for i, c := range spec.Names[0].Name[2:] {
				if c >= 'A' && c <= 'Z' && i > 0 {
					name += "_"
				}
				name += strings.ToLower(string(c))
			}
			want = append(want, name)
		}
		return true
	})
	require.Equal(t, want, OpNames())
	require.Equal(t, "put", OpPut.String())
	require.Equal(t, "unknown", Op(0).String())
	require.Equal(t, "unknown", Op(len(opNames)).String())
}

// python encodes as msgspec does: a plain list of plain values, integers in their shortest form.
func python(t *testing.T, v ...any) []byte {
	var b strings.Builder
	e := msgpack.NewEncoder(&b)
	e.UseCompactInts(true)
	require.NoError(t, e.Encode(v))
	return []byte(b.String())
}

func TestAnotherLibraryReadsWhatWeWrite(t *testing.T) {
	for _, message := range samples() {
		raw, err := Marshal(message)
		require.NoError(t, err)
		var values []any
		require.NoError(t, msgpack.Unmarshal(raw, &values))
		require.Len(t, values, reflect.TypeOf(message).Elem().NumField(), "%T", message)
	}
}

func TestWeReadWhatAnotherLibraryWrites(t *testing.T) {
	var wait WaitRequest
	for name, n := range map[string]any{"shortest": 7, "int64": int64(7), "uint16": uint16(7), "int8": int8(7), "uint64": uint64(7)} {
		var b strings.Builder
		require.NoError(t, msgpack.NewEncoder(&b).Encode([]any{"p", nil, nil, n, nil}))
		require.NoError(t, Unmarshal([]byte(b.String()), &wait), name)
		require.Equal(t, WaitRequest{Partition: "p", Count: 7}, wait, name)
	}
	list := python(t, "p", python(t, "a", strings.Repeat("b", 300)), []byte{0x90}, 0, []byte{})
	require.NoError(t, Unmarshal(list, &wait))
	require.Equal(t, WaitRequest{Partition: "p", Keys: Strings{"a", strings.Repeat("b", 300)}, Fields: Strings{}, Tags: []byte{}}, wait)
}

func TestArrayLengths(t *testing.T) {
	var task TaskRequest
	require.NoError(t, Unmarshal(python(t, "p", "t", 1, []any{map[string]any{"later": 1}}), &task), "a newer peer adds fields")
	require.Equal(t, TaskRequest{Partition: "p", Task: "t"}, task)
	require.NoError(t, Unmarshal(python(t, "q"), &task), "an older peer lacks fields")
	require.Equal(t, TaskRequest{Partition: "q"}, task)
	var reply PutReply
	require.ErrorContains(t, Unmarshal(python(t, 1, []any{[]any{1}}, nil), &reply), "array of 1")
}

func TestNilAndEmptyAreDifferent(t *testing.T) {
	for _, want := range []WaitReply{{}, {Keys: Strings{}, Tags: List{}, Fields: Strings{}}} {
		raw, err := Marshal(want)
		require.NoError(t, err)
		var got WaitReply
		require.NoError(t, Unmarshal(raw, &got))
		require.Equal(t, want.Keys == nil, got.Keys == nil)
		require.Equal(t, want.Tags == nil, got.Tags == nil)
	}
	ints := ReleaseRequest{Leases: Ints{}}
	raw, err := Marshal(ints)
	require.NoError(t, err)
	var got ReleaseRequest
	require.NoError(t, Unmarshal(raw, &got))
	require.NotNil(t, got.Leases)
}

func TestNothingDecodedSharesTheInput(t *testing.T) {
	want := &WaitReply{Keys: keys(3), Tags: List{{0x81, 0xa1, 'a', 0x01}}, Fields: Strings{"f"}}
	raw, err := Marshal(want)
	require.NoError(t, err)
	var got WaitReply
	require.NoError(t, Unmarshal(raw, &got))
	clear(raw)
	require.Equal(t, want, &got)
}

func TestRefused(t *testing.T) {
	bin := func(b ...byte) []byte { return b }
	long := strings.Repeat("\x91", MaxDepth+1) + "\xc0"
	cases := map[string]struct {
		message any
		raw     []byte
		text    string
	}{
		"empty":               {&TxnRequest{}, nil, "message TxnRequest: truncated (byte 0) of 0 bytes"},
		"nil":                 {&TxnRequest{}, bin(0xc0), "want 1"},
		"not an array":        {&TxnRequest{}, bin(0x01), "integer, want array"},
		"str for uint":        {&TxnRequest{}, python(t, "x"), "Txn: str, want integer"},
		"float for uint":      {&TxnRequest{}, python(t, 1.0), "Txn: float, want integer"},
		"negative uint":       {&TxnRequest{}, python(t, -1), "Txn: negative -1"},
		"too wide":            {&PutReply{}, python(t, 1, []any{[]any{1 << 32, nil, nil}}, nil), "Parts.Unit: 4294967296 does not fit into 32 bits"},
		"beyond int64":        {&WaitRequest{}, python(t, "", nil, nil, uint64(1)<<63, nil), "Count: 9223372036854775808 does not fit"},
		"bin for str":         {&PartitionRequest{}, python(t, []byte("p")), "Partition: bin, want str"},
		"str for bin":         {&ConfigReply{}, python(t, "p"), "Config: str, want bin"},
		"array for Strings":   {&NamesReply{}, python(t, []string{"a"}), "Names: array, want bin"},
		"int for bool":        {&RetrieveMetaRequest{}, python(t, "p", nil, 1), "Create: integer, want bool"},
		"not UTF-8":           {&PartitionRequest{}, bin(0x91, 0xa1, 0xff), "not UTF-8"},
		"Strings not UTF-8":   {&NamesReply{}, python(t, bin(0x91, 0xa1, 0xff)), "item 0 is not UTF-8"},
		"Strings of ints":     {&NamesReply{}, python(t, bin(0x91, 0x01)), "item 0 is integer, want str"},
		"Strings trailing":    {&NamesReply{}, python(t, bin(0x90, 0x01)), "1 bytes behind the end"},
		"Ints of 7 bytes":     {&ReleaseRequest{}, python(t, make([]byte, 7)), "Leases: bin of 7 bytes"},
		"trailing":            {&TxnRequest{}, bin(0x91, 1, 2), "1 bytes behind the end"},
		"invalid code":        {&TxnRequest{}, bin(0x91, 0xc1), "invalid msgpack code 0xc1"},
		"huge bin":            {&ConfigReply{}, bin(0x91, 0xc6, 0xff, 0xff, 0xff, 0xff, 0), "bin of 4294967295 with 1 bytes left"},
		"huge array":          {&UnitsReply{}, bin(0x91, 0xdd, 0xff, 0xff, 0xff, 0xff, 0), "array of 4294967295 with 1 bytes left"},
		"array beyond sense":  {&UnitsReply{}, append(bin(0x91, 0xdc, 0, 40), make([]byte, 50)...), "array of 40 with 50 bytes left"},
		"huge Strings":        {&NamesReply{}, python(t, bin(0xdd, 0, 0xff, 0xff, 0xff)), "array of 16777215 with 0 bytes left"},
		"too deep":            {&TxnRequest{}, append(bin(0x92, 1), long...), "nested deeper than 64"},
		"torn number":         {&TxnRequest{}, bin(0x91, 0xcf, 1, 2), "truncated"},
		"short column":        {&PutRequest{}, python(t, "p", nil, nil, 0, []any{[]any{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}[:12]}), "Columns: "},
		"negative insert":     {&PutRequest{}, python(t, "p", nil, nil, -1), "Insert: "},
		"insert beyond limit": {&PutRequest{}, python(t, "p", nil, nil, MaxRows+1), "Insert: "},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			err := Unmarshal(c.raw, c.message)
			require.ErrorContains(t, err, c.text)
			require.ErrorContains(t, err, "message "+reflect.TypeOf(c.message).Elem().Name())
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
		})
	}
}

func TestColumnsAreValidated(t *testing.T) {
	bad := map[string]Column{
		"rows":        uniform("a", -1),
		"row limit":   uniform("a", MaxRows+1, 0),
		"dtype":       {Field: "a", Kind: schema.Tensor, Rows: 1, Form: schema.Uniform},
		"lengths":     {Field: "a", Kind: schema.Tensor, DType: schema.Bool, Rows: 2, Form: schema.Varying, Shape: []int64{1}, Lengths: []int64{1}},
		"overflow":    uniform("a", 1<<20, 1<<31, 1<<31),
		"schema-less": {Field: "a", Rows: 1},
	}
	for name, column := range bad {
		raw, err := Marshal(&PutRequest{Columns: []Column{column}})
		require.NoError(t, err)
		err = Unmarshal(raw, new(PutRequest))
		require.ErrorContains(t, err, `Columns: field "a": `, name)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
	}
}

func TestMarshalRefusesWhatIsNoMessage(t *testing.T) {
	var missing *TxnRequest
	for _, v := range []any{nil, 3, missing, map[string]int{}, struct{ F func() }{}, struct{ x int }{1}} {
		_, err := Marshal(v)
		require.Equal(t, tqerr.Internal, tqerr.CodeOf(err), "%T", v)
		require.Error(t, Unmarshal([]byte{0x90}, v))
	}
	require.ErrorContains(t, Unmarshal([]byte{0x91, 1}, TxnRequest{}), "want a pointer")
	_, err := Marshal(ConfigReply{Config: make([]byte, MaxBody)})
	require.ErrorContains(t, err, "limit 268435456")
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
}

func TestEveryIntegerKeepsItsValueInTheShortestForm(t *testing.T) {
	for shift := range 64 {
		for _, n := range []int64{1 << shift, 1<<shift - 1, -1 << shift, -1<<shift - 1, -1<<shift + 1} {
			got := appendInt(nil, n)
			var b strings.Builder
			e := msgpack.NewEncoder(&b)
			require.NoError(t, e.EncodeInt(n))
			require.Equal(t, b.String(), string(got), "%d", n)
			back, err := (&scanner{data: got}).int(64)
			require.NoError(t, err)
			require.Equal(t, n, back)
		}
		u := uint64(1) << shift
		back, err := (&scanner{data: appendUint(nil, u)}).uint(64)
		require.NoError(t, err)
		require.Equal(t, u, back)
	}
}

func TestStringsOfEveryLengthClass(t *testing.T) {
	want := NamesReply{}
	for _, n := range []int{0, 1, 31, 32, 255, 256, 65535, 65536} {
		want.Names = append(want.Names, strings.Repeat("x", n))
	}
	raw, err := Marshal(want)
	require.NoError(t, err)
	var got NamesReply
	require.NoError(t, Unmarshal(raw, &got))
	require.Equal(t, want.Names, got.Names)
	many := NamesReply{Names: keys(70000)}
	raw, err = Marshal(many)
	require.NoError(t, err)
	require.NoError(t, Unmarshal(raw, &got))
	require.Equal(t, many.Names, got.Names)
}

// splitArray splits the bytes of one msgpack array into the bytes of its values.
func splitArray(raw []byte) ([][]byte, error) {
	s := scanner{data: raw}
	return s.items(MaxDepth)
}

func TestSplitArray(t *testing.T) {
	raw := python(t, 1, "two", []any{3}, map[string]any{"four": nil}, 5.5, []byte{6}, true, int64(-1<<40))
	items, err := splitArray(raw)
	require.NoError(t, err)
	require.Len(t, items, 8)
	rejoined := appendArrayHeader(nil, len(items))
	for _, item := range items {
		rejoined = append(rejoined, item...)
	}
	require.Equal(t, raw, rejoined)
	items, err = splitArray([]byte{0xc0})
	require.NoError(t, err)
	require.Nil(t, items)
	for _, bad := range [][]byte{nil, {0x91}, {0x80}, {0x90, 0}, []byte(strings.Repeat("\x91", MaxDepth+2) + "\xc0")} {
		_, err := splitArray(bad)
		require.Error(t, err, "%x", bad)
	}
	_, err = splitArray([]byte(strings.Repeat("\x91", MaxDepth+1) + "\xc0"))
	require.NoError(t, err, "the limit itself is allowed")
	for _, ext := range [][]byte{{0x91, 0xd4, 1, 2}, {0x91, 0xd8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {0x91, 0xc7, 1, 9, 9}} {
		items, err := splitArray(ext)
		require.NoError(t, err)
		require.Equal(t, ext[1:], items[0])
	}
}

func TestErrorReply(t *testing.T) {
	named := tqerr.WithOp("put", tqerr.New(tqerr.SchemaMismatch, "field %q", "ids"))
	cause := &tqerr.Error{Code: tqerr.IO, Op: "get", Msg: "read", Cause: fmt.Errorf("EIO")}
	cases := map[string]struct {
		err  error
		want tqerr.Error
	}{
		"named":    {named, tqerr.Error{Code: tqerr.SchemaMismatch, Op: "put", Msg: `field "ids"`}},
		"cause":    {cause, tqerr.Error{Code: tqerr.IO, Op: "get", Msg: "read: EIO"}},
		"wrapped":  {fmt.Errorf("unit 3: %w", named), tqerr.Error{Code: tqerr.SchemaMismatch, Msg: `unit 3: put: field "ids"`}},
		"stranger": {fmt.Errorf("boom"), tqerr.Error{Code: tqerr.Internal, Msg: "boom"}},
		"says OK":  {&tqerr.Error{Msg: "x"}, tqerr.Error{Code: tqerr.Internal, Msg: "x"}},
	}
	for name, c := range cases {
		var got *tqerr.Error
		require.ErrorAs(t, ErrorReply(c.err).Err(), &got, name)
		require.Equal(t, c.want, *got, name)
	}
	require.NoError(t, (&Reply{}).Err())
	broken := (&Reply{Code: tqerr.NotFound, Body: []byte{0xc1}}).Err()
	require.Equal(t, tqerr.NotFound, tqerr.CodeOf(broken))
}
