"""How much there is to do for a consumer group, now and soon, told to autoscalers (ADR 0037)."""
