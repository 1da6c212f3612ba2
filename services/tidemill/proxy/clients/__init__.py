"""Connected clients: their settings, metrics, telemetry streams, and operators' questions."""
