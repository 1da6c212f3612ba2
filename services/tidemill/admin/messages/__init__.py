"""Messages for the REST API: compose and place a send, show, trace and list."""
