"""The demand of consumer groups, now and soon, for autoscalers (ADR 0037)."""
