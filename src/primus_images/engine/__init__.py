"""From a plan to an image in the store: what runs, in what order, and how."""
