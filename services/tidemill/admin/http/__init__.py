"""The shell of the REST API: connections, access, error documents, pages and metrics."""
