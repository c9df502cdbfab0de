"""Run a command in an image's root file system: the kernel alone or a Docker engine, one interface."""
