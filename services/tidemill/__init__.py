"""Tidemill, a message broker that official Apache RocketMQ 5 clients use unmodified."""
