"""Jobs on several machines: rendering what a scheduler gets, and submitting it."""
