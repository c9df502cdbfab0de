"""Options of the host's verbs. A verb's own module is imported once its options are read: `--help` stays fast."""
