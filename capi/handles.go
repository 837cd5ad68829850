package main

import (
	"sync"

	"transferqueue/core/tqerr"
)

// firstHandle is a number that no accident produces: not a small integer, not an address.
const firstHandle = 0x5451_0000_0001

// table maps handles to what they stand for.
type table struct {
	mu   sync.RWMutex
	next uint64
	byID map[uint64]any
}

var handles = &table{next: firstHandle, byID: map[uint64]any{}}

func (t *table) add(v any) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	id := t.next
	t.next++
	t.byID[id] = v
	return id
}

func (t *table) all() []any {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]any, 0, len(t.byID))
	for _, v := range t.byID {
		out = append(out, v)
	}
	return out
}

// get returns what a handle stands for.
func get[T any](id uint64) (T, error) {
	handles.mu.RLock()
	v, ok := handles.byID[id].(T)
	handles.mu.RUnlock()
	if !ok {
		return v, tqerr.New(tqerr.InvalidState, "handle %#x is closed or not a %T", id, v)
	}
	return v, nil
}

// take removes a handle and returns what it stood for.
func take[T any](id uint64) (T, error) {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	v, ok := handles.byID[id].(T)
	if !ok {
		return v, tqerr.New(tqerr.InvalidState, "handle %#x is closed or not a %T", id, v)
	}
	delete(handles.byID, id)
	return v, nil
}
