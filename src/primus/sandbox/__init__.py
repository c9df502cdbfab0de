"""Running a command in an image's root file system, with an OCI runtime or a Docker engine behind one interface."""
