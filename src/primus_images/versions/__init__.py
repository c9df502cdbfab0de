"""The input of a build: versions.yaml, its schema, and the lock."""
