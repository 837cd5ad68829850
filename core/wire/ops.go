package wire

// opNames are the public names of the requests; the index of a name is its number.
var opNames = [...]string{
	"", "put", "commit", "abort", "get", "release", "clear", "clear_partition", "list", "wait", "watch_open", "watch_next",
	"watch_close", "meta", "retrieve_meta", "retrieve_keys", "set_tags", "consumption", "reset_consumption", "production",
	"partitions", "units", "config", "status",
}

// String returns the name of the request, "unknown" for a number that is none.
func (o Op) String() string {
	if o > 0 && int(o) < len(opNames) {
		return opNames[o]
	}
	return "unknown"
}

// OpNames lists the names of all requests; the index of a name is its number, and number 0 has none.
func OpNames() []string { return append([]string(nil), opNames[:]...) }
