"""Connected clients: their settings, metrics and telemetry streams, and questions of operators."""
