"""The broker's shell: gRPC handlers, long polling, and the rounds that call the engine."""
