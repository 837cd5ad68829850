//go:build zmq

package zmq

import "crypto/subtle"

// Places of a request of ZAP (ZeroMQ RFC 27): version, request id, domain, address, routing id, mechanism, credentials.
const (
	zapVersion   = 0
	zapRequest   = 1
	zapMechanism = 5
	zapPassword  = 7
	zapParts     = 8
)

// judge answers the question of a ROUTER whether a connection may go on.
func judge(parts [][]byte, token []byte) []string {
	status, text := "400", "the token is not that of this session"
	if len(parts) == zapParts && string(parts[zapMechanism]) == "PLAIN" && subtle.ConstantTimeCompare(parts[zapPassword], token) == 1 {
		status, text = "200", "OK"
	}
	request := ""
	if len(parts) > zapRequest {
		request = string(parts[zapRequest])
	}
	return []string{"1.0", request, status, text, "", ""}
}
