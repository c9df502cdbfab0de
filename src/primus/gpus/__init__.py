"""One table of GPU generations, and detection."""
