package catalog

import "transferqueue/core/schema"

// Existing returns those samples of a write that exist, in the order of its rows. Read-only.
func (c *Catalog) Existing(w *Write) []schema.Sample {
	p := c.partitions[w.Partition]
	if p == nil {
		return nil
	}
	var out []schema.Sample
	for _, key := range w.Keys {
		if i, ok := c.find(p, key); ok {
			out = append(out, c.sample(i))
		}
	}
	for _, s := range w.Samples {
		if c.owns(p, s) {
			out = append(out, s)
		}
	}
	return out
}
