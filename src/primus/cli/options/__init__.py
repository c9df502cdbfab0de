"""Options of the host verbs. The verb's own module is imported only after parsing, so `--help` stays fast."""
