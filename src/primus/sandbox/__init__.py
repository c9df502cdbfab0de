"""Run a command in a root file system: embedded (namespaces + overlayfs) or Docker."""
