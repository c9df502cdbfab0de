"""The table of GPU generations, and detection of this machine's GPUs."""
