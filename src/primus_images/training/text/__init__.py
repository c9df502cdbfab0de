"""What text becomes: the documents of a corpus, and their tokens."""
