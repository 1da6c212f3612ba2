//go:build tools

// The programs that judge our transport from outside: h2spec for HTTP/2, grpcurl for what people use.
package tools

import (
	_ "github.com/fullstorydev/grpcurl/cmd/grpcurl"
	_ "github.com/summerwind/h2spec/cmd/h2spec"
)
