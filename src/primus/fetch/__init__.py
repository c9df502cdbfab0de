"""Fetch locked files by name and hash, through the host's own pip, apt and registry settings."""
