package wire

// opNames are the public names of the requests; the index of a name is its number.
var opNames = [...]string{
	"", "put", "commit", "abort", "get", "release", "clear", "clear_partition", "list", "wait", "watch_open", "watch_next",
	"watch_close", "meta", "retrieve_meta", "retrieve_keys", "set_tags", "consumption", "reset_consumption", "production",
	"partitions", "units", "config", "status", "snapshot", "register_sampler", "save_checkpoint", "load_checkpoint",
	"dump_rows", "load_rows", "metrics", "join_units", "create_partition", "store_config", "stream",
	"progress",
	"unit_open", "unit_stage", "unit_commit", "unit_abort", "unit_read", "unit_release", "unit_delete", "unit_transform",
	"unit_stats", "unit_prepare", "unit_inventory", "unit_discard", "lost", "unit_advise", "unit_piece", "reach_unit", "unit_ticket",
	"unit_settle", "drain", "uncordon", "job",
	"move", "rebalance",
}

// String returns the name of the request, "unknown" for a number that is none.
func (o Op) String() string {
	if o > 0 && int(o) < len(opNames) {
		return opNames[o]
	}
	return "unknown"
}

// publicNames are the operations that users know, where they differ from the request's own name.
var publicNames = map[Op]string{
	OpCommit: "put", OpAbort: "put", OpWatchOpen: "watch", OpWatchNext: "watch", OpWatchClose: "watch", OpMeta: "get_meta",
	OpRetrieveMeta: "kv_retrieve_meta", OpRetrieveKeys: "kv_retrieve_keys", OpSetTags: "set_custom_meta",
	OpConsumption: "get_consumption_status", OpProduction: "get_production_status", OpPartitions: "get_partition_list",
	OpUnits: "list_units", OpConfig: "init", OpDumpRows: "dump_data_by_key", OpLoadRows: "load_data_by_key",
	OpSnapshot: "get_partition_snapshot", OpJoinUnits: "init", OpStream: "check_stream_drained",
	OpProgress: "check_consumption_status", OpLost: "list_lost", OpReachUnit: "reach a unit", OpJob: "drain",
}

// Public returns the operation as users know it, which is what errors name.
func (o Op) Public() string {
	if name, differs := publicNames[o]; differs {
		return name
	}
	return o.String()
}

// OpNames lists the names of all requests; the index of a name is its number, and number 0 has none.
func OpNames() []string { return append([]string(nil), opNames[:]...) }
