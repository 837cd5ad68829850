//go:build zmq

package zmq

import "crypto/subtle"

// Places of a request of ZAP (ZeroMQ RFC 27): version, request id, domain, address, routing id, mechanism, credentials.
const (
	zapRequest   = 1
	zapMechanism = 5
)

// judge answers the question of a ROUTER whether a connection may go on. wanted are the mechanism and its credentials.
func judge(parts [][]byte, wanted [][]byte) []string {
	status, text := "400", "the token is not that of this session"
	if len(parts) == zapMechanism+len(wanted) && same(parts[zapMechanism:], wanted) {
		status, text = "200", "OK"
	}
	request := ""
	if len(parts) > zapRequest {
		request = string(parts[zapRequest])
	}
	return []string{"1.0", request, status, text, "", ""}
}

// same compares in a time that does not depend on the bytes.
func same(given, wanted [][]byte) bool {
	equal := 1
	for i := range wanted {
		equal &= subtle.ConstantTimeCompare(given[i], wanted[i])
	}
	return equal == 1
}
