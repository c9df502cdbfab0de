"""Running a command in an image, by podman or Docker."""
