"""What goes in: versions.yaml, its schema and the lock."""
