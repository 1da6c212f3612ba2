"""The command line: processes to start, and nouns with verbs over the admin API."""
