"""The JSON of the REST API: one module of schemas per resource, and rendering."""
