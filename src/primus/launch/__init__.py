"""Jobs on several machines: what a scheduler is given, rendered before anything is submitted."""
