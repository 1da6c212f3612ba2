//go:build tools

// What judges our alerts and dashboards: promtool for rules and their tests, and Prometheus itself.
package tools

import (
	_ "github.com/prometheus/prometheus/cmd/prometheus"
	_ "github.com/prometheus/prometheus/cmd/promtool"
)
