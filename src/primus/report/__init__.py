"""Pages and tables made from records."""
