"""The audit log at the admin process: authors of changes, controller actions, and pages."""
