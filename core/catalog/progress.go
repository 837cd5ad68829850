package catalog

// Progress counts the samples of a partition, reserved ones included, and those of them that a task has consumed. Read-only.
// It reports whether the partition exists.
func (c *Catalog) Progress(partition, task string) (samples, consumed int, known bool) {
	p := c.partitions[partition]
	if p == nil {
		return 0, 0, false
	}
	samples = p.owned.Count()
	if done := p.consumed[task]; done != nil {
		consumed = done.Count()
	}
	return samples, consumed, true
}
