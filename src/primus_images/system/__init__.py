"""The image's own view of itself: banner and environment."""
